"""Spend a budget of state: the sizes at which a design keeps as many numbers as others do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from membydesign.design import Design

MOST = 64
"""The largest key or value size that is tried."""


class Cannot(ValueError):
    """A design cannot do a task; the message says why and is shown in its row."""


class Fit(NamedTuple):
    """Sizes of a memory.

    Attributes:
        D: key size.
        M: value size.
        state: numbers kept per head.
    """

    D: int
    M: int
    state: int

    def __str__(self) -> str:
        return f"{self.D}×{self.M}: {self.state}"


def fit(design: Design, D: int, M: int) -> Fit | None:
    """Return the sizes if the design can have them."""
    if design.refuse_key_size(D) or design.refuse_value_size(M):
        return None
    return Fit(D, M, design.state_size(D, M).total)


def most_values(design: Design, D: int, budget: int) -> Fit:
    """Return the most value columns within the budget, for keys of a given size.

    Raises:
        Cannot: if the design does not accept such keys, or keeps too much.
    """
    if design.layer_key_size(D) != D:
        raise Cannot(f"takes keys of {design.layer_key_size(D)} entries for D = {D}, where the task has {D}")
    return _largest([fit(design, D, M) for M in range(1, MOST + 1)], budget, f"D = {D}", design.refuse_key_size(D))


def most_keys(design: Design, M: int, budget: int) -> Fit:
    """Return the largest key size within the budget, for a given number of value columns.

    Raises:
        Cannot: if the design does not accept such values, or keeps too much.
    """
    fits = [fit(design, D, M) for D in range(2, MOST + 1) if design.layer_key_size(D) == D]
    return _largest(fits, budget, f"M = {M}", design.refuse_value_size(M))


def _largest(fits: list[Fit | None], budget: int, given: str, refused: str | None) -> Fit:
    possible = [each for each in fits if each is not None]
    if not possible:
        raise Cannot(f"expects {refused or 'other sizes'}, where the task has {given}")
    within = [each for each in possible if each.state <= budget]
    if not within:
        raise Cannot(f"keeps {min(each.state for each in possible)} numbers at least with {given}: above the budget")
    return max(within)
