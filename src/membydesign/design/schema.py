"""What a design says about itself: equations, sizes, and the parameters that it needs at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Bound = Literal["> 0", ">= 0", "<= 0", "[0, 1]", "finite"]
"""The values that a number may take."""

_BOUNDS: tuple[str, ...] = get_args(Bound)
_IDLE = {"> 0": 1.0, ">= 0": 0.0, "<= 0": 0.0, "finite": 0.0}
_RESERVED = frozenset(
    (
        *("design", "belief", "q", "k", "v", "initial", "cu_seqlens", "method", "chunk_size", "backend"),
        *("state_dtype", "return_variance", "return_evidence", "stretch"),
    )
)


@dataclass(frozen=True)
class Equation:
    r"""One equation, for reading in a terminal (`text`) and for typesetting (`latex`, without dollar signs)."""

    text: str
    latex: str

    def with_term(self, old: Equation, new: Equation) -> Equation:
        """The same equation with one term replaced, wherever it occurs."""
        return Equation(self.text.replace(old.text, new.text), self.latex.replace(old.latex, new.latex))


class StateSize(NamedTuple):
    """Numbers kept per head between two tokens.

    Attributes:
        mean: elements of the mean, D·M.
        covariance: elements of everything else: the covariance, counts, scales; 0 if nothing else is kept.
    """

    mean: int
    covariance: int = 0

    @property
    def total(self) -> int:
        """Elements of the whole state."""
        return self.mean + self.covariance


@dataclass(frozen=True)
class StepParameter:
    r"""A number, or a vector of numbers, that a design needs at every token and head.

    Attributes:
        name: the argument of `filter_sequence` that carries it; any name that is not one of the function's own.
        symbol: its letter in the equations.
        axes: the axes that follow [B,T,H]: letters of the legend ("D", "D/2", "M", "G") or whole numbers.
        optional_axes: whether [B,T,H] without those axes is accepted too, one number shared along them.
        bound: the values it may take.
        idle: its value at a token that leaves memory as it is (with a key of zero). Packed sequences of similar length
            are padded with such tokens to be filtered together; None keeps them apart. By default 1 for "> 0", None
            for "[0, 1]", otherwise 0.
    """

    name: str
    symbol: str
    axes: tuple[str | int, ...] = ()
    optional_axes: bool = False
    bound: Bound = "finite"
    idle: float | Literal["by bound"] | None = "by bound"

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in _RESERVED:
            raise ValueError(
                f"StepParameter(name): expected a name that filter_sequence does not use itself, got {self.name!r}"
            )
        if not isinstance(self.axes, tuple) or not all(_is_axis(axis) for axis in self.axes):
            raise ValueError(
                f'StepParameter(axes): expected a tuple of "D", "D/2", "M", "G" or whole numbers, got {self.axes!r}'
            )
        if self.bound not in _BOUNDS:
            *first, last = (f'"{bound}"' for bound in _BOUNDS)
            raise ValueError(f"StepParameter(bound): expected {', '.join(first)} or {last}, got {self.bound!r}")
        if self.idle == "by bound":
            object.__setattr__(self, "idle", _IDLE.get(self.bound))

    @property
    def shape(self) -> str:
        """The accepted shapes, as text: `[B,T,H]`, `[B,T,H,D]`, …"""
        full = f"[{','.join(('B,T,H', *map(str, self.axes)))}]"
        return f"[B,T,H] or {full}" if self.optional_axes and self.axes else full

    def sizes(self, D: int, M: int, groups: int) -> tuple[int, ...]:
        """The sizes of its axes after [B,T,H]."""
        letters = {"D": D, "D/2": D // 2, "M": M, "G": groups}
        return tuple(letters[axis] if isinstance(axis, str) else axis for axis in self.axes)


def _is_axis(axis: object) -> bool:
    return axis in ("D", "D/2", "M", "G") or (type(axis) is int and axis > 0)
