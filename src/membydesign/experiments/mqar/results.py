"""Summarise the runs of MQAR: choose learning rates by validation, and average over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.mqar.models import ARMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Metrics = dict[str, Any]
"""The metrics of one run."""

Entry = dict[str, Any]
"""The results of one arm at one width: see `entries`."""


def entries(runs: Sequence[Metrics]) -> list[Entry]:
    """Return one entry for every arm and width, in the order of the runs.

    An entry has "learning_rate", the chosen one; "validation", what it was chosen by, for every learning rate tried
    (None if it diverged); "test" and "curve" of the chosen one, means over seeds; "accuracy_by_seed"; sizes; and
    "seconds" of training, of one run of the chosen one, and "seconds_of_all" learning rates and seeds. If every
    learning rate diverged, "learning_rate" and "test" are None.
    """
    return [_entry(arm, width, rates) for (arm, width), rates in by_learning_rate(runs).items()]


def by_learning_rate(runs: Sequence[Metrics]) -> dict[tuple[str, int], dict[float, list[Metrics]]]:
    """Group the runs of every arm and width by learning rate."""
    grouped: dict[tuple[str, int], dict[float, list[Metrics]]] = {}
    for run in runs:
        grouped.setdefault((run["arm"], run["width"]), {}).setdefault(run["learning_rate"], []).append(run)
    return grouped


def _entry(arm: str, width: int, rates: dict[float, list[Metrics]]) -> Entry:
    rate = choose(rates)
    every = [run for seeds in rates.values() for run in seeds]
    kept = [] if rate is None else converged(rates[rate])
    of_chosen = {key: mean([run[key] for run in kept]) if kept else None for key in ("test", "curve", "seconds")}
    return {
        "arm": arm,
        "title": ARMS[arm].title,
        "width": width,
        "learning_rate": rate,
        "validation": {f"{each:g}": _validation(seeds) for each, seeds in rates.items()},
        "diverged": {f"{each:g}": len(seeds) - len(converged(seeds)) for each, seeds in rates.items()},
        **of_chosen,
        "accuracy_by_seed": [run["test"]["accuracy"] for run in kept],
        "seconds_of_all": sum(run["seconds"] for run in every),
        **{key: (kept or every)[0][key] for key in ("parameters", "state", "steps", "tokens")},
    }


def choose(rates: Mapping[float, Sequence[Metrics]]) -> float | None:
    """Choose the learning rate with the best validation accuracy among those that diverged for the fewest seeds.

    Accuracies are means over seeds. Of equal ones the lower cross-entropy decides. None if all runs diverged.

    Args:
        rates: the runs of every learning rate, one for each seed.
    """

    def merit(rate: float) -> tuple[int, float, float]:
        cell = _validation(rates[rate]) or {"accuracy": 0.0, "cross_entropy": 0.0}
        return len(converged(rates[rate])), cell["accuracy"], -cell["cross_entropy"]

    best = max(rates, key=merit)
    return best if converged(rates[best]) else None


def converged(runs: Sequence[Metrics]) -> list[Metrics]:
    """Return the runs that did not diverge."""
    return [run for run in runs if run["diverged"] is None]


def _validation(runs: Sequence[Metrics]) -> dict[str, float] | None:
    kept = converged(runs)
    return mean([run["validation"] for run in kept]) if kept else None


def mean(values: Sequence[Any]) -> Any:
    """Average numbers, and dictionaries and lists of the same form element by element."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean(each) for each in zip(*values, strict=True)]
    if first is None or all(value == first for value in values):
        return first
    return sum(values) / len(values)


def accuracies(entries: Sequence[Entry], width: int) -> dict[str, float]:
    """Return test accuracy in per cent by arm, at one width; without arms that diverged."""
    return {e["arm"]: 100 * e["test"]["accuracy"] for e in entries if e["width"] == width and e["test"] is not None}


def widest(entries: Sequence[Entry]) -> int:
    """Return the largest width that was run."""
    return max(entry["width"] for entry in entries)
