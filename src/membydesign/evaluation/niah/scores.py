"""Needle-in-a-haystack scores by task, length and depth, and differences between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from membydesign.evaluation.niah.run import Answered

Row = TypeVar("Row", str, tuple[int, str])

ENOUGH = 30
"""Cells with fewer samples are marked, since they may be due to chance."""

DECILES: tuple[str, ...] = tuple(f"{i / 10:.1f}" for i in range(10))
"""Lower bounds of the depth deciles."""


@final
@dataclass(frozen=True)
class Cell:
    """A mean in per cent, with the number of samples or needles.

    Attributes:
        mean: mean from 0 to 100; for differences from −100 to 100.
        count: number of samples or needles.
        standard_error: standard error of the mean, if computed.
    """

    mean: float
    count: int
    standard_error: float | None = None

    @property
    def few(self) -> bool:
        """Whether the count is below 30."""
        return self.count < ENOUGH


def decile(depth: float) -> int:
    """Return the decile of a depth: 0 for 0.0–0.1, …, 9 for 0.9–1.0, including 1."""
    return min(int(10 * depth), 9)


def by_task(answered: Sequence[Answered]) -> dict[int, dict[str, Cell]]:
    """Average RULER's score over samples, for every length and task."""
    scores: dict[int, dict[str, list[float]]] = {}
    for one in answered:
        scores.setdefault(one.length, {}).setdefault(one.task, []).append(one.score)
    return {length: {task: _cell(s) for task, s in tasks.items()} for length, tasks in sorted(scores.items())}


def mean_of_tasks(tasks: dict[str, Cell]) -> float:
    """Average over tasks with equal weights."""
    return sum(cell.mean for cell in tasks.values()) / len(tasks)


def by_depth(answered: Sequence[Answered], row: Callable[[Answered], Row]) -> dict[Row, list[Cell | None]]:
    """Compute the percentage of needles recalled, by row and depth decile; each needle counts at its own depth.

    Args:
        answered: samples with answers.
        row: function from a sample to its row: `task_of` or `length_and_task`.

    Returns:
        Ten cells per row; None for a cell without needles.
    """
    rows: dict[Row, list[list[float]]] = {}
    for one in answered:
        cells = rows.setdefault(row(one), [[] for _ in range(10)])
        for depth, correct in zip(one.depths, one.correct, strict=True):
            cells[decile(depth)].append(100.0 * correct)
    return {name: [_cell(values) if values else None for values in cells] for name, cells in rows.items()}


def task_of(one: Answered) -> str:
    """Make one row per task, over all lengths."""
    return one.task


def length_and_task(one: Answered) -> tuple[int, str]:
    """Make one row per task and length."""
    return one.length, one.task


def over_tasks(rows: Mapping[tuple[int, str], Sequence[Cell | None]]) -> dict[int, list[Cell | None]]:
    """Average rows of lengths and tasks into rows of lengths, with equal weights for all tasks present in a cell.

    With equal weights per needle, multivalue and multiquery would make up two thirds of the mean, since they query four
    needles instead of one. A cell's count is the number of all its needles.
    """
    by_length: dict[int, list[list[Cell]]] = {}
    for (length, _), cells in rows.items():
        of_length = by_length.setdefault(length, [[] for _ in range(10)])
        for at, cell in zip(of_length, cells, strict=True):
            at.extend([] if cell is None else [cell])
    return {
        length: [
            Cell(sum(cell.mean for cell in cells) / len(cells), sum(cell.count for cell in cells)) if cells else None
            for cells in by_length[length]
        ]
        for length in sorted(by_length)
    }


def common(first: Sequence[Answered], second: Sequence[Answered]) -> tuple[list[Answered], list[Answered]]:
    """Return the samples that both models answered, in one order; raise an error if none, or if seeds differ."""
    seeds = {one.seed for one in (*first, *second)}
    if len(seeds) > 1:
        raise ValueError(f"seed: expected the same samples of both, got seeds {', '.join(map(str, sorted(seeds)))}")
    others = {one.key: one for one in second}
    pairs = [(one, others[one.key]) for one in first if one.key in others]
    if not pairs:
        raise ValueError("results: expected samples of the same task, length and number in both, got none")
    return [one for one, _ in pairs], [other for _, other in pairs]


def difference_by_task(first: Sequence[Answered], second: Sequence[Answered]) -> dict[int, dict[str, Cell]]:
    """Subtract the second model's scores from the first's by length and task, with standard errors over samples.

    Both arguments come from `common`.
    """
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
    """Subtract the second model's scores from the first's by row and depth decile; counts are the smaller ones."""
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
