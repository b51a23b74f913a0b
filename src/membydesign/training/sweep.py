"""A sweep: many runs, as many at a time as there are cores; what is done is skipped, what was begun goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from membydesign.errors import FilterError
from membydesign.files import to_json, write_text
from membydesign.training import checkpoint
from membydesign.training.loop import Diverged
from membydesign.training.processes import processes
from membydesign.training.workers import WorkerDied, in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from membydesign.training.loop import Progress

    Watch = Callable[[str, Progress | None], None]

METRICS, CONFIG = "metrics.json", "config.json"


class SweepError(RuntimeError):
    """A sweep that cannot go on, and why."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: of the folder it writes to.
        config: its settings, a dataclass; a folder that holds others is refused.
        work: `work(config, directory, watch)` does the run and returns its metrics, which JSON must hold. It must be a
            function of a module, since other processes import it, and must leave checkpoints in `directory`.
    """

    name: str
    config: Any
    work: Callable[[Any, Path, Callable[[Progress], None]], dict[str, Any]]


def sweep(
    runs: Iterable[Run],
    directory: Path,
    *,
    workers: int = 1,
    threads: int = 1,
    watch: Watch = lambda _name, _progress: None,
) -> dict[str, dict[str, Any]]:
    """Do all runs, and return their metrics by name.

    A run that has its `metrics.json` is not done again; one that has a checkpoint goes on from it. Each run uses
    `threads` threads, so that results do not depend on how many run at a time.

    Ctrl-C raises KeyboardInterrupt after every run under way has saved a checkpoint, and starts no other run; pressed
    again, it ends them at once. SIGTERM does the same where a handler raises, and else ends the program.

    Processes that `accelerate launch` started together do all runs together, one after another, and the first of them
    writes.

    Args:
        runs: what to do, in order.
        directory: with one folder for each run.
        workers: runs at a time; 1 does them in this process.
        threads: of torch, for each run.
        watch: called with the name of a run and its progress, or None when it is done.

    Raises:
        SweepError: if a folder holds a run of the same name with other settings, if a run diverges, if the process of
            a run dies, or if processes that were launched together are to have workers.
    """
    runs, launched = list(runs), processes()
    if launched.num_processes > 1 and workers > 1:
        raise SweepError(
            f"workers: expected 1 under `accelerate launch`, whose processes share each run, got {workers}"
        )
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"runs: expected names that differ, got {', '.join(names)}")
    if launched.is_main_process:
        for run in runs:
            _claim(directory / run.name, run)
    launched.wait_for_everyone()
    waiting = [run for run in runs if _metrics(directory / run.name) is None]
    if workers == 1:
        for run in waiting:
            _alone(run, directory / run.name, threads, lambda p, name=run.name: watch(name, p))
            watch(run.name, None)
    elif waiting:
        tasks = {run.name: partial(_alone, run, directory / run.name, threads) for run in waiting}
        try:
            in_parallel(tasks, workers, watch)
        except WorkerDied as error:
            raise SweepError(str(error)) from error
    done = {run.name: _metrics(directory / run.name) for run in runs}
    return {name: metrics for name, metrics in done.items() if metrics is not None}


def _plain(config: Any) -> Any:
    return json.loads(to_json(asdict(config) if is_dataclass(config) and not isinstance(config, type) else config))


def _claim(directory: Path, run: Run) -> None:
    """Write the settings of a run into its folder, or make sure that they are the ones that are there."""
    path = directory / CONFIG
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_text(path, to_json(_plain(run.config)))
        return
    there, wanted = json.loads(path.read_text(encoding="utf-8")), _plain(run.config)
    if there != wanted:
        differ = sorted(key for key in {*there, *wanted} if there.get(key) != wanted.get(key))
        what = ", ".join(f"{key} {there.get(key)!r} instead of {wanted.get(key)!r}" for key in differ)
        raise SweepError(f"{directory} holds a run with other settings ({what}); choose another folder, or remove it")


def _metrics(directory: Path) -> dict[str, Any] | None:
    path = directory / METRICS
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SweepError(f"{path}: expected JSON ({error}); remove the file to do the run again") from error


def _alone(run: Run, directory: Path, threads: int, watch: Callable[[Progress], None]) -> None:
    """Do one run in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        metrics = run.work(run.config, directory, watch)
    except (Diverged, FilterError) as error:
        raise SweepError(f"{run.name}: {error}") from error
    finally:
        torch.set_num_threads(before)
    launched = processes()
    launched.wait_for_everyone()
    if launched.is_main_process:
        write_text(directory / METRICS, to_json(metrics))
        for path in checkpoint.found(directory):
            shutil.rmtree(path, ignore_errors=True)
    launched.wait_for_everyone()
