"""Scores of needle-in-a-haystack by task, length and depth, and differences between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from membydesign.evaluation.niah_run import Answered

Row = TypeVar("Row", str, tuple[int, str])

ENOUGH = 30
"""A cell of fewer is marked: chance may have made it."""

DECILES: tuple[str, ...] = tuple(f"{i / 10:.1f}" for i in range(10))
"""Where deciles of depth begin."""


@final
@dataclass(frozen=True)
class Cell:
    """A mean in per cent, and of how many samples or needles.

    Attributes:
        mean: from 0 to 100; for differences from −100 to 100.
        count: how many it is the mean of.
        standard_error: of the mean, where it was asked for.
    """

    mean: float
    count: int
    standard_error: float | None = None

    @property
    def few(self) -> bool:
        """Whether it is of fewer than 30."""
        return self.count < ENOUGH


def decile(depth: float) -> int:
    """Of a depth from 0 to 1: 0 for 0.0–0.1, …, 9 for 0.9–1.0, to which 1 itself belongs."""
    return min(int(10 * depth), 9)


def by_task(answered: Sequence[Answered]) -> dict[int, dict[str, Cell]]:
    """RULER's score of every length and task, over samples."""
    scores: dict[int, dict[str, list[float]]] = {}
    for one in answered:
        scores.setdefault(one.length, {}).setdefault(one.task, []).append(one.score)
    return {length: {task: _cell(s) for task, s in tasks.items()} for length, tasks in sorted(scores.items())}


def mean_of_tasks(tasks: dict[str, Cell]) -> float:
    """Every task counts the same."""
    return sum(cell.mean for cell in tasks.values()) / len(tasks)


def by_depth(answered: Sequence[Answered], row: Callable[[Answered], Row]) -> dict[Row, list[Cell | None]]:
    """The share of needles found, by whatever `row` says and by depth decile; every needle at its own depth.

    Args:
        answered: samples with answers.
        row: `task_of` or `length_and_task`.

    Returns:
        Ten cells for each row; None where there is no needle.
    """
    found: dict[Row, list[list[float]]] = {}
    for one in answered:
        cells = found.setdefault(row(one), [[] for _ in range(10)])
        for depth, correct in zip(one.depths, one.correct, strict=True):
            cells[decile(depth)].append(100.0 * correct)
    return {name: [_cell(values) if values else None for values in cells] for name, cells in found.items()}


def task_of(one: Answered) -> str:
    """A row for each task, all lengths together."""
    return one.task


def length_and_task(one: Answered) -> tuple[int, str]:
    """A row for each task at each length."""
    return one.length, one.task


def over_tasks(rows: Mapping[tuple[int, str], Sequence[Cell | None]]) -> dict[int, list[Cell | None]]:
    """Rows of lengths and tasks as rows of lengths. Every task with a needle in a cell counts the same.

    Otherwise two thirds of a mean would be of multivalue and multiquery, which ask for four needles where others ask
    for one. A cell's count is that of all its needles.
    """
    found: dict[int, list[list[Cell]]] = {}
    for (length, _), cells in rows.items():
        of_length = found.setdefault(length, [[] for _ in range(10)])
        for at, cell in zip(of_length, cells, strict=True):
            at.extend([] if cell is None else [cell])
    return {
        length: [
            Cell(sum(cell.mean for cell in cells) / len(cells), sum(cell.count for cell in cells)) if cells else None
            for cells in found[length]
        ]
        for length in sorted(found)
    }


def common(first: Sequence[Answered], second: Sequence[Answered]) -> tuple[list[Answered], list[Answered]]:
    """The samples that both answered, in one order; refused if there are none, or if seeds differ."""
    seeds = {one.seed for one in (*first, *second)}
    if len(seeds) > 1:
        raise ValueError(f"seed: expected the same samples of both, got seeds {', '.join(map(str, sorted(seeds)))}")
    others = {one.key: one for one in second}
    pairs = [(one, others[one.key]) for one in first if one.key in others]
    if not pairs:
        raise ValueError("results: expected samples of the same task, length and number in both, got none")
    return [one for one, _ in pairs], [other for _, other in pairs]


def difference_by_task(first: Sequence[Answered], second: Sequence[Answered]) -> dict[int, dict[str, Cell]]:
    """First minus second by length and task, with the standard error over samples, of what `common` gives."""
    scores: dict[int, dict[str, list[float]]] = {}
    for one, other in zip(first, second, strict=True):
        scores.setdefault(one.length, {}).setdefault(one.task, []).append(one.score - other.score)
    return {
        length: {task: _cell(s, with_error=True) for task, s in tasks.items()}
        for length, tasks in sorted(scores.items())
    }


def difference_by_depth(
    first: Sequence[Answered], second: Sequence[Answered], row: Callable[[Answered], Row]
) -> dict[Row, list[Cell | None]]:
    """First minus second by row and depth decile; a cell counts as many needles as the smaller of the two."""
    ours, theirs = by_depth(first, row), by_depth(second, row)
    return {
        name: [
            None if a is None or b is None else Cell(a.mean - b.mean, min(a.count, b.count))
            for a, b in zip(cells, theirs[name], strict=True)
        ]
        for name, cells in ours.items()
    }


def _cell(values: Sequence[float], with_error: bool = False) -> Cell:
    n = len(values)
    mean = sum(values) / n
    if not with_error or n < 2:
        return Cell(mean, n)
    return Cell(mean, n, math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n))
