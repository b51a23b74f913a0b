"""Carry out an experiment in a folder: lock it, show progress, resume, and write the record."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from membydesign.cli.output import fail
from membydesign.cli.stopping import resumable
from membydesign.errors import FilterError
from membydesign.experiments.shared.run_context import RunContext
from membydesign.files import read_json, to_json
from membydesign.reports import record
from membydesign.reports.provenance import Provenance, commit
from membydesign.reports.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from membydesign import training
    from membydesign.experiments import Experiment


@dataclass(frozen=True)
class Job:
    """An experiment with its settings and its folder.

    Attributes:
        name: of the experiment.
        module: what does it.
        preset: the name of its settings.
        config: its settings.
        out: the folder of its results.
        title: of its report.
        trains: whether it has training runs, which can be stopped and resumed.
    """

    name: str
    module: Experiment
    preset: str
    config: Any
    out: Path
    title: str
    trains: bool = True


def carry_out(
    job: Job, *, workers: int | None, resume: bool, data: Path | None = None, only_finished: bool = False
) -> bool:
    """Do the work and write the record, unless it is finished; return whether this process should show the result.

    Args:
        job: what to do.
        workers: training runs at a time; None for one per core, or one with a GPU.
        resume: whether to continue in a folder that holds training runs.
        data: the folder of the texts that the settings name.
        only_finished: whether to report finished training runs without doing the others.
    """
    out = job.out
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    launched, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    if resume and _finished(job):
        return first
    if first and not resume and (out / "runs").exists():  # the others wait for the first before they make anything
        raise fail(f"--out: {out} holds training runs; continue them with --resume, or name another folder")
    commit()  # cached now, because the checkout may change while the experiment runs
    workers = workers or (1 if launched > 1 or torch.accelerator.is_available() else os.cpu_count() or 1)
    with (
        _owned(out) if job.trains and first else nullcontext(),
        resumable() if job.trains else nullcontext(),
        Sessions(out if job.trains and first else None, resume=resume) as sessions,
        _Bars(shown=first) as bars,
    ):
        context = RunContext(out, workers, bars.stage, bars.total, bars.watch, data, only_finished)
        try:
            outcome = job.module.run(job.config, context)
        except refusals() as error:
            raise fail(str(error)) from None
        if not first:
            return False
        bars.stage("figures")
        figures = job.module.plot(outcome, out)
        provenance = Provenance.now(job.name, job.preset, sessions.seconds, sessions.count)
        record.write(out, outcome, provenance, job.title, figures)
    return True


@contextmanager
def _owned(out: Path) -> Iterator[None]:
    """Hold the lock of the folder of the results; exit with an error if another process does."""
    from membydesign.training import FolderInUse
    from membydesign.training.lock import locked

    with ExitStack() as stack:
        try:
            stack.enter_context(locked(out))
        except FolderInUse as error:
            raise fail(f"--out: {error}") from None
        yield


def refusals() -> tuple[type[Exception], ...]:
    """Errors of training that say what to do; none if training is not installed."""
    try:
        from membydesign.experiments.retrofit.training import TeacherError
        from membydesign.experiments.shared.texts import TextsError
        from membydesign.training import CheckpointError, Diverged, FolderInUse, SweepError
    except ModuleNotFoundError:
        return ()
    return (CheckpointError, Diverged, FilterError, FolderInUse, SweepError, TeacherError, TextsError)


class _Bars:
    """Progress on standard error: the stage, finished training runs, and a bar for each that is running."""

    def __init__(self, shown: bool = True) -> None:
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )
        self.all = self.progress.add_task("starting", total=None, note="")
        self.runs: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def stage(self, name: str) -> None:
        """Say what is being done."""
        self.progress.update(self.all, description=name)

    def total(self, runs: int) -> None:
        """Say how many training runs there are to do."""
        self.progress.update(self.all, total=runs, completed=0)

    def watch(self, name: str, now: training.Progress | None) -> None:
        """Move the bar of a training run."""
        if now is None:
            if name in self.runs:
                self.progress.remove_task(self.runs.pop(name))
            self.progress.advance(self.all)
            return
        if name not in self.runs:
            self.runs[name] = self.progress.add_task(f"  {name}", total=now.steps, note="")
        speed = f"{now.rate:.1f} steps/s" if now.token_rate is None else f"{now.token_rate:,.0f} tokens/s"
        note = speed if now.loss is None else f"loss {now.loss:.4f}, {speed}"
        self.progress.update(self.runs[name], completed=now.step, note=note)


def _finished(job: Job) -> bool:
    """Whether the folder has the results of these settings, and of all that they stand for today."""
    expected = json.loads(to_json({"preset": job.preset, **asdict(job.config)}))
    try:
        if not (job.out / "metrics.json").exists() or read_json(job.out / "config.json") != expected:
            return False
        lacks = getattr(job.module, "lacks", None)
        return lacks is None or not lacks(job.config, read_json(job.out / "metrics.json")["metrics"])
    except (OSError, ValueError, KeyError):
        return False
