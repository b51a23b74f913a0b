"""What a design says about itself: equations, sizes, and the parameters it asks of every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Equation:
    r"""One equation, for reading in a terminal (`text`) and for typesetting (`latex`, without dollar signs)."""

    text: str
    latex: str


class StateSize(NamedTuple):
    """Numbers kept per head between two tokens.

    Attributes:
        mean: elements of the mean, D·M.
        covariance: elements of the covariance, 0 where none is kept.
    """

    mean: int
    covariance: int

    @property
    def total(self) -> int:
        """Elements of mean and covariance together."""
        return self.mean + self.covariance


@dataclass(frozen=True)
class StepParameter:
    r"""A number that the design asks for at every token and head.

    Attributes:
        name: the argument of `filter_sequence` that carries it.
        symbol: its letter in the paper.
        last_axis: the axis that follows [B,T,H], as a letter of the legend: "" (none), "D", "D/2", "G" or "M".
        optional_axis: whether [B,T,H] without that axis is accepted too, one number shared along it.
        bound: the values it may take.
    """

    name: str
    symbol: str
    last_axis: Literal["", "D", "D/2", "G", "M"] = ""
    optional_axis: bool = False
    bound: Literal["> 0", ">= 0", "<= 0", "finite"] = "finite"

    def __post_init__(self) -> None:
        if self.last_axis not in ("", "D", "D/2", "G", "M"):
            raise ValueError(f'StepParameter(last_axis): expected "", "D", "D/2", "G" or "M", got {self.last_axis!r}')
        if self.bound not in ("> 0", ">= 0", "<= 0", "finite"):
            raise ValueError(f'StepParameter(bound): expected "> 0", ">= 0", "<= 0" or "finite", got {self.bound!r}')

    @property
    def shape(self) -> str:
        """The accepted shapes, as text: `[B,T,H]`, `[B,T,H,D]`, …"""
        full = f"[B,T,H,{self.last_axis}]" if self.last_axis else "[B,T,H]"
        return f"[B,T,H] or {full}" if self.optional_axis else full
