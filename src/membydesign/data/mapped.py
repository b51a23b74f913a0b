"""Large tensors on disk: written piece by piece, whole or not at all; read by mapping, so that only what is used loads.

The files are safetensors files, which other programs read too. What they hold, and what it was made from, stands in a
header, so that a file can be used again as long as nothing changed, and is refused where it does not fit.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import warnings
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

DTYPES = {"U16": torch.int16, "U32": torch.int32, "I64": torch.int64}
"""The types of safetensors that are written, and as what they are read: `widen` undoes the signs."""

HEADER = "membydesign"
"""Under which name the header stands among the metadata of the file."""

ROOM = 512
"""Bytes of the file's beginning for what is known only at the end: sizes, counts, hashes."""

_partial_numbers = count()


@final
@dataclass(frozen=True, eq=False)
class Mapped:
    """A file that is mapped into memory.

    Attributes:
        header: what the file holds.
        tensors: by name, each of one axis, in the types of `DTYPES`; never to be written to.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def widen(x: Tensor) -> Tensor:
    """Numbers of a mapped tensor as int64; what was read as negative int16 are the larger ones of uint16."""
    return x.to(torch.int64) & {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF, torch.int64: -1}[x.dtype]


@final
class Writer:
    """Writes a file beside its place and moves it there at the end, for `with`; an error leaves nothing behind.

    Args:
        path: its place; what is there is replaced.
        header: what is known of its header from the beginning.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header, self._done = path, dict(header), False
        self._sizes: dict[str, tuple[str, int]] = {}
        self._digest = hashlib.sha256()
        self._room = -(-(len(_encoded(self.header, {})) + ROOM) // 8) * 8
        # Two processes that write the same file do not write into one another's: the last to end has its place.
        self._partial = path.with_name(f"{path.name}.{os.getpid()}-{next(_partial_numbers)}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")
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
        """Append numbers to a tensor; tensors are written one after another, each in as many pieces as one likes.

        Args:
            name: of the tensor.
            dtype: of the numbers, one of `DTYPES`.
            data: as bytes, or a tensor of the type that `DTYPES` gives.
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
        """Complete the header, with a hash of all numbers, and move the file to its place."""
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
        self._file.close()
        os.replace(self._partial, self.path)
        self._done = True


def _encoded(header: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    metadata = {HEADER: json.dumps(header, ensure_ascii=False, allow_nan=False)}
    return json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False).encode()


def read_mapped(path: Path, kind: str) -> Mapped:
    """Map a file.

    Args:
        path: of the file.
        kind: what it has to hold, as its header says.

    Raises:
        ValueError: if there is none, if it is another kind of file, or not whole.
    """
    if not path.is_file():
        raise ValueError(f"path: expected a file of {kind}, and there is no {path}")
    with path.open("rb") as file:
        try:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size)) if size < path.stat().st_size else {}
            header = json.loads(entries.pop("__metadata__")[HEADER])
            found = header["kind"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"path: expected a file of {kind} that this package wrote, and {path} is none; move it away"
            ) from None
        if found != kind:
            raise ValueError(f"path: expected a file of {kind}, and {path} is one of {found}")
        end = max(entry["data_offsets"][1] for entry in entries.values())
        if path.stat().st_size != 8 + size + end:
            raise ValueError(
                f"path: expected {8 + size + end:,} bytes, and {path} has {path.stat().st_size:,}; "
                "it is damaged: remove it, and it is made anew"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*buffer is not writable.*")
        for name, entry in entries.items():
            start, _ = entry["data_offsets"]
            tensors[name] = torch.frombuffer(
                mapped, dtype=DTYPES[entry["dtype"]], count=entry["shape"][0], offset=8 + size + start
            )
    return Mapped(header, tensors)


def read_header(path: Path, kind: str) -> dict[str, Any] | None:
    """The header of a file, or None if there is no file; other errors as of `read_mapped`."""
    return read_mapped(path, kind).header if path.exists() else None


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What of a header is not as expected, in words; what is not expected to be anything does not count."""
    return [
        f"its {name} is {json.dumps(found.get(name), ensure_ascii=False)}, not {json.dumps(value, ensure_ascii=False)}"
        for name, value in expected.items()
        if found.get(name) != value
    ]
