"""Call compiled functions with C structs that are filled by field name.

C states each struct once (`csrc/layout.h`) and exports its layout as text. Python reads that text from the compiled
library, so that the two cannot disagree: a reordered field is still filled correctly, and a field that only one side
knows raises a `LayoutError` that names it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.filter import readable
from membydesign.filter.native import build as native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

_FORMATS = {"INT": "q", "DOUBLE": "d", "READ": "P", "READ_OR_NULL": "P", "WRITE": "P", "WRITE_OR_NULL": "P"}
"""The kinds of fields in layout.h, and how Python's `struct` module packs them."""

_NUMBERS = {"INT": int, "DOUBLE": float}


class LayoutError(RuntimeError):
    """Python and C disagree about a struct: a bug, found before any memory is touched."""


class Struct:
    """A struct of a compiled source.

    Args:
        source: the C file.
        dtype: of the tensors that the struct points to.
        name: of the struct.
    """

    def __init__(self, source: str, dtype: torch.dtype, name: str) -> None:
        self._where, self._dtype = f"struct {name} of {source}", dtype
        kinds = (line.split() for line in _exported(source, dtype, f"{name}_layout").splitlines())
        self.fields = {field: kind for kind, field in kinds}
        if unknown := set(self.fields.values()) - set(_FORMATS):
            raise LayoutError(f"{self._where}: expected fields of the kinds {', '.join(_FORMATS)}, got {unknown}")
        self._plan = [
            (field, _NUMBERS.get(kind), kind.endswith("_OR_NULL"), kind.startswith("WRITE"))
            for field, kind in self.fields.items()
        ]
        self._pack = struct.Struct("".join(_FORMATS[kind] for kind in self.fields.values())).pack

    def fill(self, values: Mapping[str, Tensor | float | None]) -> tuple[bytes, list[Tensor]]:
        """Pack numbers and pointers to tensors; also return those tensors, to be kept until C has returned."""
        if len(values) != len(self._plan):
            self._refuse_names(values)
        entries, tensors = [], []
        for name, number, nullable, written in self._plan:
            if name not in values:
                self._refuse_names(values)
            value = values[name]
            if number is not None:
                if not isinstance(value, number):
                    self._refuse(name, f"a number of type {number.__name__}", value)
                entries.append(value)
            elif isinstance(value, torch.Tensor) and value.dtype is self._dtype:
                if not value.is_contiguous():
                    if written:
                        self._refuse(name, "a contiguous tensor, since C writes to it", value)
                    value = value.contiguous()
                if type(value) not in readable.PLAIN and readable.is_wrapper(type(value)):
                    self._refuse(name, "a plain tensor, since C reads its memory", value)
                if value.is_neg():
                    value = self._settled(name, value, written)
                address = value.data_ptr()
                if address < readable.LOWEST and readable.is_null(value, address):
                    value = self._settled(name, value, written)
                    address = value.data_ptr()
                tensors.append(value)
                entries.append(address)
            elif value is None and nullable:
                entries.append(0)
            else:
                self._refuse(name, f"a tensor in {self._dtype}", value)
        return self._pack(*entries), tensors

    def _settled(self, name: str, value: Tensor, written: bool) -> Tensor:
        """The numbers of a tensor to read that memory does not have as they are."""
        if written or not (value.is_neg() or value._is_zerotensor()):
            self._refuse(name, "a tensor with memory of its own", value)
        return readable.settled(value)

    def packer(self, names: Sequence[str]) -> Callable[[Sequence[int]], bytes]:
        """Return a fast form of `fill`, for the pointers of these fields, in the order of `names`; others are null.

        It checks names once, here, and values never.
        """
        required = {name for name, _, nullable, _ in self._plan if not nullable}
        if len(set(names)) != len(names) or not required <= set(names) <= self.fields.keys():
            self._refuse_names(names)
        for name, number, *_ in self._plan:
            if number is not None:
                self._refuse(name, "a number", "a pointer")
        places = {name: place for place, name in enumerate(names)}
        order, pack = itemgetter(*(places.get(name, len(places)) for name in self.fields)), self._pack
        return lambda pointers: pack(*order([*pointers, 0]))

    def _refuse_names(self, names: Iterable[str]) -> None:
        unknown, missing = sorted(set(names) - self.fields.keys()), sorted(self.fields.keys() - set(names))
        raise LayoutError(
            f"{self._where}: expected the fields {', '.join(self.fields)}; "
            f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}"
        )

    def _refuse(self, name: str, expected: str, value: object) -> None:
        got = f"a {value.dtype} {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        raise LayoutError(f"{self._where}, field {name}: expected {expected}, got {got}")


class Function(NamedTuple):
    """A function of a compiled source, which `ENTRY` of layout.h defines.

    Attributes:
        source: the C file.
        structs: the two structs that it takes.
        call: the C function; it takes both structs, packed, the number of heads, and the number of threads.
    """

    source: str
    structs: tuple[Struct, ...]
    call: Any

    def __call__(self, heads: int, *values: Mapping[str, Tensor | float | None]) -> None:
        """Work on independent heads, on torch's threads, with structs of these values.

        Raises:
            MemoryError: if a thread could not allocate its workspace. The tensors that C writes are then incomplete.
        """
        (first, tensors), (second, more) = (s.fill(x) for s, x in zip(self.structs, values, strict=True))
        missing = self.call(first, second, heads, torch.get_num_threads())
        del tensors, more  # which C has read and written
        if missing:
            raise out_of_memory(self.source, missing)


def out_of_memory(source: str, size: int) -> MemoryError:
    """Make the error for a thread of native code that could not allocate `size` bytes."""
    return MemoryError(
        f"{source}: expected {size} bytes ({size / 2**30:.3g} GiB) of workspace for each thread, got none"
    )


@functools.cache
def function(source: str, dtype: torch.dtype, name: str, structs: tuple[str, str]) -> Function:
    """Look up a function of a compiled source that takes these structs."""
    exported = _exported(source, dtype, f"{name}_structs")
    if exported != " ".join(structs):
        raise LayoutError(f"{name} of {source}: expected it to take the structs {' '.join(structs)}, got {exported}")
    call = getattr(_library(source, dtype), name)
    call.argtypes, call.restype = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2, ctypes.c_int64
    return Function(source, tuple(Struct(source, dtype, struct_name) for struct_name in structs), call)


def cases(source: str, dtype: torch.dtype, name: str) -> dict[str, int]:
    """Return the numbers of an enum of C, by the names of its cases."""
    return {case: number for number, case in enumerate(_exported(source, dtype, f"{name}_cases").split())}


def _library(source: str, dtype: torch.dtype) -> ctypes.CDLL:
    compiled = native.library(source, dtype)
    assert compiled is not None, "callers ask `native.available` first"
    return compiled


def _exported(source: str, dtype: torch.dtype, name: str) -> str:
    """Read a string that a compiled source exports."""
    try:
        text = ctypes.c_char_p.in_dll(_library(source, dtype), name).value
    except ValueError:
        raise LayoutError(f"{source}: expected it to export {name} (see layout.h), got a library without it") from None
    assert text is not None
    return text.decode()
