"""Tabulate needle-in-a-haystack scores, for reports and for the terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from membydesign.evaluation.niah import TASKS
from membydesign.evaluation.niah.scores import (
    DECILES,
    ENOUGH,
    Cell,
    by_depth,
    by_task,
    difference_by_depth,
    difference_by_task,
    length_and_task,
    mean_of_tasks,
    over_tasks,
    task_of,
)
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.evaluation.niah.run import Answered

_NOTE = f"In brackets, how many. A star marks fewer than {ENOUGH}."
_DEPTHS = "0.0 is depths from 0.0 to 0.1, the beginning of the haystack; 0.9 is its end."
_EQUAL = " Every task counts the same."


def scores_metrics(answered: Sequence[Answered]) -> dict[str, Any]:
    """Return all scores as plain numbers."""
    cells = by_depth(answered, length_and_task)
    return {"by_task": _tasks_metrics(by_task(answered)), **_all_depths(cells, by_depth(answered, task_of))}


def scores_tables(answered: Sequence[Answered]) -> list[RecordTable]:
    """Tabulate scores by task; needles by length and depth, by task and depth, and by all three."""
    cells, of_tasks = by_depth(answered, length_and_task), in_order(by_depth(answered, task_of))
    return [
        _tasks_table("RULER score by task and context length, in per cent", by_task(answered)),
        _depth_table("Needles found by context length and depth, in per cent", over_tasks(cells), note=_EQUAL),
        _depth_table("Needles found by task and depth, in per cent", of_tasks),
        _depth_table("Needles found by context length, task and depth, in per cent", _flat(cells)),
    ]


def difference_metrics(first: Sequence[Answered], second: Sequence[Answered]) -> dict[str, Any]:
    """Return all differences, first minus second, as plain numbers."""
    same = sum(a.prompt_sha256 == b.prompt_sha256 for a, b in zip(first, second, strict=True))
    cells = difference_by_depth(first, second, length_and_task)
    return {
        "samples": len(first),
        "same_prompts": same,
        "by_task": _tasks_metrics(difference_by_task(first, second)),
        **_all_depths(cells, difference_by_depth(first, second, task_of)),
    }


def difference_tables(first: Sequence[Answered], second: Sequence[Answered]) -> list[RecordTable]:
    """Tabulate differences, first minus second."""
    cells = difference_by_depth(first, second, length_and_task)
    of_tasks = in_order(difference_by_depth(first, second, task_of))
    by_length = "Difference by context length and depth, in points"
    return [
        _tasks_table("Difference by task and context length, in points", difference_by_task(first, second)),
        _depth_table(by_length, over_tasks(cells), signed=True, note=_EQUAL),
        _depth_table("Difference by task and depth, in points", of_tasks, signed=True),
        _depth_table("Difference by context length, task and depth, in points", _flat(cells), signed=True),
    ]


def in_order(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Sort rows of tasks into RULER's order."""
    return {task: rows[task] for task in TASKS if task in rows}


def short(task: str) -> str:
    """Return a task's name without the common prefix."""
    return task.removeprefix("niah_")


def _flat(rows: Mapping[tuple[int, str], Sequence[Cell | None]]) -> dict[str, Sequence[Cell | None]]:
    """Sort rows by length and then into RULER's order."""
    names = [*TASKS]
    ordered = sorted(rows.items(), key=lambda row: (row[0][0], names.index(row[0][1])))
    return {f"{length:,} {short(task)}": cells for (length, task), cells in ordered}


def _tasks_table(title: str, rows: Mapping[int, dict[str, Cell]]) -> RecordTable:
    tasks = [task for task in TASKS if any(task in cells for cells in rows.values())]
    lines = []
    for length, cells in rows.items():
        shown = [_shown(cells.get(task), signed=_signed(cells)) for task in tasks]
        mean = mean_of_tasks(cells)
        lines.append([f"{length:,}", *shown, f"{mean:+.2f}" if _signed(cells) else f"{mean:.2f}"])
    note = f"{_NOTE} The mean is over tasks, each of which counts the same."
    if any(map(_signed, rows.values())):
        note += " ± is the standard error over samples, paired."
    return RecordTable(title, ["context", *map(short, tasks), "mean"], lines, note)


def _signed(cells: dict[str, Cell]) -> bool:
    return any(cell.standard_error is not None for cell in cells.values())


def _depth_table(
    title: str, rows: Mapping[Any, Sequence[Cell | None]], signed: bool = False, note: str = ""
) -> RecordTable:
    lines = [
        [f"{row:,}" if isinstance(row, int) else short(row), *(_shown(cell, signed) for cell in cells)]
        for row, cells in rows.items()
    ]
    return RecordTable(title, ["", *DECILES], lines, f"{_NOTE} {_DEPTHS}{note}")


def _shown(cell: Cell | None, signed: bool = False) -> str:
    if cell is None:
        return "—"
    mean = f"{cell.mean:+.1f}" if signed else f"{cell.mean:.1f}"
    error = "" if cell.standard_error is None else f" ± {cell.standard_error:.1f}"
    return f"{mean}{error} ({cell.count}{'*' if cell.few else ''})"


def _tasks_metrics(rows: Mapping[int, dict[str, Cell]]) -> dict[str, Any]:
    return {
        str(length): {**{task: _plain(cell) for task, cell in cells.items()}, "mean": mean_of_tasks(cells)}
        for length, cells in rows.items()
    }


def _all_depths(
    cells: Mapping[tuple[int, str], Sequence[Cell | None]], of_tasks: Mapping[str, Sequence[Cell | None]]
) -> dict[str, Any]:
    by_length: dict[str, dict[str, Any]] = {}
    for (length, task), row in cells.items():
        by_length.setdefault(str(length), {}).update(_depth_metrics({task: row}))
    return {
        "by_length_and_depth": _depth_metrics(over_tasks(cells)),
        "by_task_and_depth": _depth_metrics(of_tasks),
        "by_length_task_and_depth": by_length,
    }


def _depth_metrics(rows: Mapping[Any, Sequence[Cell | None]]) -> dict[str, Any]:
    return {str(row): [None if cell is None else _plain(cell) for cell in cells] for row, cells in rows.items()}


def _plain(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in asdict(cell).items() if value is not None}
