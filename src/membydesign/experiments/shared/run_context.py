"""The folder, workers and progress callbacks of a run of an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from membydesign.training import Progress, Run


@dataclass(frozen=True)
class RunContext:
    """Where an experiment runs, and who is told about its progress.

    Attributes:
        directory: the folder of the results; training runs have folders below its `runs`.
        workers: training runs at a time.
        stage: called with the name of each stage.
        total: called with the number of training runs before they start.
        watch: called with the name of a training run and its progress, or None when it is done.
        data: the folder of the texts that the settings name; None if there is none.
        only_finished: whether `sweep` returns the metrics of finished runs without doing the others.
    """

    directory: Path = Path("runs")
    workers: int = 1
    stage: Callable[[str], None] = lambda _: None
    total: Callable[[int], None] = lambda _: None
    watch: Callable[[str, Progress | None], None] = lambda _name, _progress: None
    data: Path | None = None
    only_finished: bool = False

    @property
    def runs(self) -> Path:
        """The folder of training runs."""
        return self.directory / "runs"

    def sweep(self, runs: Sequence[Run], *, alone: bool = False) -> dict[str, dict[str, Any]]:
        """Do the training runs that are not finished yet; return the metrics of all, by name.

        Args:
            runs: the training runs.
            alone: do one run at a time, with as many threads as there are workers; for runs that others wait for.
        """
        from membydesign.training import METRICS, sweep

        if self.only_finished:
            runs = [run for run in runs if (self.runs / run.name / METRICS).exists()]
        self.total(sum(not (self.runs / run.name / METRICS).exists() for run in runs))
        workers, threads = (1, self.workers) if alone else (self.workers, 1)
        return sweep(runs, self.runs, workers=workers, threads=threads, watch=self.watch)
