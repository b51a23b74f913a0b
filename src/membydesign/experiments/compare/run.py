"""Compare every design of the catalogue: collision, learned recall, random keys, and calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.compare.config import PRESETS, RANDOM, TASKS, CompareConfig, folder
from membydesign.experiments.compare.figures import plot
from membydesign.experiments.compare.tables import notes, tables
from membydesign.reports.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.experiments.shared.run_context import RunContext

__all__ = ["PRESETS", "TITLE", "CompareConfig", "lacks", "plot", "run"]

TITLE = "Every design of the catalogue on the same tasks"


def run(config: CompareConfig, context: RunContext) -> Outcome:
    """Do every run that is not finished yet, and tabulate all."""
    context.stage("designs")
    metrics = context.sweep(config.runs())
    designs = {name: {task: _over_seeds(config, metrics, task, name) for task in TASKS} for name in config.names}
    return Outcome(config, [], {"designs": designs}, notes(config, designs), designs, tables(config, designs))


def lacks(config: CompareConfig, metrics: Mapping[str, Any]) -> bool:
    """Return whether results lack a run, such as those of designs that were added to the catalogue since."""
    found = metrics["designs"]
    expected = {task: config.seeds if task in RANDOM else 1 for task in TASKS}
    return any(len(found.get(name, {}).get(task, ())) < n for name in config.names for task, n in expected.items())


def _over_seeds(
    config: CompareConfig, metrics: Mapping[str, dict[str, Any]], task: str, name: str
) -> list[dict[str, Any]]:
    """Return the results of a design on a task, one per seed."""
    every = (metrics.get(folder(task, name, seed)) for seed in range(config.seeds))
    return [each for each in every if each is not None]
