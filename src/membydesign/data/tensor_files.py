"""Large tensors on disk: written incrementally and atomically, read piece by piece.

The files are safetensors files, which other programs can read too. A header records their contents and what they were
made from, so that a file is reused while nothing has changed and rejected when it does not match.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, final
from weakref import finalize

import torch

from membydesign.files import open_partial, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

DTYPES = {"U16": torch.int16, "U32": torch.int32, "I64": torch.int64}
"""Stored safetensors types and the torch types they are read as; `widen` restores unsigned values."""

HEADER = "membydesign"
"""Metadata key of the header."""

ROOM = 512
"""Bytes reserved at the start of the file for what is known only at the end: sizes, counts, hashes."""

LONGEST_HEADER = 100_000_000
"""Most bytes of a header, as in safetensors."""

BLOCK = 2**22
"""Bytes hashed at a time."""


class Entry(NamedTuple):
    """A tensor in a file: its stored type, a key of `DTYPES`, the number of its elements, and where its bytes begin."""

    dtype: str
    length: int
    at: int


def widen(x: Tensor) -> Tensor:
    """Convert a stored tensor to int64, undoing the sign: negative int16 values are the larger half of uint16."""
    return x.to(torch.int64) & {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF, torch.int64: -1}[x.dtype]


@final
class Writer:
    """Context manager that writes a temporary file and moves it into place at the end; an error leaves nothing behind.

    Args:
        path: destination; an existing file is replaced.
        header: header entries known from the beginning.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header, self._done = path, dict(header), False
        self._sizes: dict[str, tuple[str, int]] = {}
        self._digest = hashlib.sha256()
        self._room = -(-(len(_encoded(self.header, {})) + ROOM) // 8) * 8
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each writer has a temporary file of its own; the last one to finish replaces the destination.
        self._file, self._partial = open_partial(path)
        self._file.write(bytes(8 + self._room))

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if not self._done:
            self._partial.unlink(missing_ok=True)

    def add(self, name: str, dtype: str, data: bytes | Tensor) -> None:
        """Append data to a tensor; tensors are written one after another, each in any number of pieces.

        Args:
            name: tensor name.
            dtype: stored type, a key of `DTYPES`.
            data: bytes, or a tensor of the type that `DTYPES` names.
        """
        if isinstance(data, torch.Tensor):
            assert data.dtype == DTYPES[dtype]
            data = data.contiguous()
            content = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())) if len(data) else b""
        else:
            content = data
        assert name not in self._sizes or name == [*self._sizes][-1], "tensors are written one after another"
        self._sizes[name] = dtype, self._sizes.get(name, (dtype, 0))[1] + len(content)
        self._digest.update(content)
        self._file.write(content)

    def done(self, **more: Any) -> None:
        """Complete the header, including a hash of all data, and move the file into place."""
        start, entries = 0, {}
        for name, (dtype, size) in self._sizes.items():
            numbers = size // DTYPES[dtype].itemsize
            entries[name] = {"dtype": dtype, "shape": [numbers], "data_offsets": [start, start + size]}
            start += size
        text = _encoded({**self.header, **more, "sha256": self._digest.hexdigest()}, entries)
        if len(text) > self._room:
            raise ValueError(f"header: expected at most {self._room} bytes, got {len(text)}")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        _verified.add(_identity(self._file.fileno()))
        self._file.close()
        os.replace(self._partial, self.path)
        self._done = True


def _encoded(header: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    metadata = {HEADER: json.dumps(header, ensure_ascii=False, allow_nan=False)}
    return json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False).encode()


@final
class TensorFile:
    """One-dimensional tensors of a file, read piece by piece.

    The file is read with system calls, not through a memory map: if it is truncated while it is in use, reading raises
    an error, where a map would end the process (SIGBUS). A file that replaces it does not change what is read.

    Args:
        path: file to read.
        kind: required contents, as named in the header.
        names: tensors that it must have.

    Attributes:
        header: description of the contents.
        entries: stored type, number of elements and position in the file of each tensor.

    Raises:
        ValueError: if the file is missing, of another kind, incomplete, or not as this package writes it.
    """

    def __init__(self, path: Path, kind: str, names: Collection[str] = ()) -> None:
        if not path.is_file():
            raise ValueError(f"path: expected a file of {kind}, and there is no {path}")
        self.path, self._kind, self._names, self._lock = path, kind, tuple(names), Lock()
        self._file = path.open("rb", buffering=0)
        finalize(self, self._file.close)
        self.header, self.entries = self._read_header(kind)
        missing = [name for name in names if name not in self.entries]
        if missing:
            raise self._damaged(f"expected the tensors {', '.join(names)}, and there is no {', '.join(missing)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorFile, (self.path, self._kind, self._names)  # another process has no such open file

    def length(self, name: str) -> int:
        """Return the number of elements of a tensor."""
        return self.entries[name].length

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the elements from `start` up to, not including, `stop` as int64, [n]; as a slice does."""
        entry = self.entries[name]
        start, stop, _ = slice(start, stop).indices(entry.length)
        return self._elements(entry, [start], max(0, stop - start))

    def rows(self, name: str, length: int, rows: Tensor) -> Tensor:
        """Divide a tensor into rows of L elements and return some of them as int64, [rows,L]."""
        entry, numbers = self.entries[name], rows.tolist()
        count = entry.length // length
        if numbers and not 0 <= min(numbers) <= max(numbers) < count:
            raise IndexError(f"rows: expected numbers from 0 to {count - 1}, got {min(numbers)} to {max(numbers)}")
        return self._elements(entry, [row * length for row in numbers], length).view(len(numbers), length)

    def verify(self) -> None:
        """Compare the data with the hash in the header, once per process while the file does not change.

        Raises:
            ValueError: if they differ.
        """
        identity = _identity(self._file.fileno())
        if identity in _verified:
            return
        digest, at = hashlib.sha256(), min((entry.at for entry in self.entries.values()), default=0)
        buffer = memoryview(bytearray(BLOCK))
        while at < identity.size:
            block = buffer[: identity.size - at]
            self._fill(block, at)
            digest.update(block)
            at += len(block)
        if digest.hexdigest() != self.header.get("sha256"):
            raise self._damaged(f"expected data with sha256 {self.header.get('sha256')}, got {digest.hexdigest()}")
        _verified.add(identity)

    def _elements(self, entry: Entry, starts: Sequence[int], count: int) -> Tensor:
        """Return `count` elements from each of the starts on, one after another, as int64."""
        dtype, size = DTYPES[entry.dtype], count * DTYPES[entry.dtype].itemsize
        if not size or not starts:
            return torch.empty(0, dtype=torch.int64)
        data = bytearray(len(starts) * size)
        view = memoryview(data)
        for i, start in enumerate(starts):
            self._fill(view[i * size : (i + 1) * size], entry.at + start * dtype.itemsize)
        return widen(torch.frombuffer(data, dtype=dtype))

    def _fill(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer from a position in the file."""
        while buffer:
            count = self._read_at(buffer, at)
            if not count:
                size = os.fstat(self._file.fileno()).st_size
                raise self._damaged(f"expected at least {at + len(buffer):,} bytes, and it now has {size:,}")
            buffer, at = buffer[count:], at + count

    def _read_at(self, buffer: memoryview, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [buffer], at)
        with self._lock:  # Windows can only move the position that all threads share
            self._file.seek(at)
            return self._file.readinto(buffer)

    def _read_header(self, kind: str) -> tuple[dict[str, Any], dict[str, Entry]]:
        size = os.fstat(self._file.fileno()).st_size
        try:
            start = bytearray(8)
            self._fill(memoryview(start), 0)
            length = int.from_bytes(start, "little")
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError
            text = bytearray(length)
            self._fill(memoryview(text), 8)
            stored = parse_json(bytes(text))
            header = parse_json(stored.pop("__metadata__")[HEADER])
            stored_kind = header["kind"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"path: expected a file of {kind} that this package wrote, and {self.path} is not; move it away"
            ) from None
        if stored_kind != kind:
            raise ValueError(f"path: expected a file of {kind}, and {self.path} is one of {stored_kind}")
        entries, end = {}, 8 + length
        for name, entry in stored.items():
            entries[name] = self._entry(name, entry, end - 8 - length, 8 + length)
            end = entries[name].at + entries[name].length * DTYPES[entries[name].dtype].itemsize
        if size != end:
            raise ValueError(
                f"path: expected {end:,} bytes, and {self.path} has {size:,}; it is damaged: remove it to have it "
                "rebuilt"
            )
        return header, entries

    def _entry(self, name: str, entry: Any, start: int, data: int) -> Entry:
        """Check where a tensor says it is: right after the one before, and as long as its shape and type say."""
        try:
            dtype, [count], [first, last] = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = all(type(x) is int and x >= 0 for x in (count, first, last))
            if numbers and dtype in DTYPES and first == start and last - first == count * DTYPES[dtype].itemsize:
                return Entry(dtype, count, data + first)
        except (KeyError, TypeError, ValueError):
            pass
        raise self._damaged(
            f"expected the tensor {name!r} to have one of the types {', '.join(DTYPES)}, one dimension, and its data "
            f"from byte {start:,} on, got {json.dumps(entry)[:200]}"
        )

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"path: {how} in {self.path}; it is damaged: remove it to have it rebuilt")


class _Identity(NamedTuple):
    """What changes if a file is written to or replaced."""

    device: int
    inode: int
    size: int
    modified: int


_verified: set[_Identity] = set()


def _identity(handle: int) -> _Identity:
    status = os.fstat(handle)
    return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_header(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the header of a file, or None if there is no file; raises the same errors as `TensorFile`."""
    return TensorFile(path, kind).header if path.exists() else None


def differences(header: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe the entries of a header that differ from the expected ones; other entries are ignored."""
    return [
        f"its {name} is {json.dumps(header.get(name), ensure_ascii=False)}, not {json.dumps(value, ensure_ascii=False)}"
        for name, value in expected.items()
        if header.get(name) != value
    ]
