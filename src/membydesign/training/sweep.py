"""Sweeps: many runs, several at a time; finished runs are skipped and interrupted ones continue."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from membydesign.errors import FilterError
from membydesign.files import read_object, to_json, write_text
from membydesign.training import checkpoint
from membydesign.training.distributed import processes
from membydesign.training.identity import differences, plain
from membydesign.training.lock import locked
from membydesign.training.loop import Diverged
from membydesign.training.workers import WorkerDied, in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from membydesign.training.loop import Progress

    Watch = Callable[[str, Progress | None], None]

METRICS = "metrics.json"
"""The file that a finished run writes its results into."""
CONFIG = "config.json"
ORPHAN_SECONDS = 10.0
"""How long a sweep waits for a run folder that a worker of a killed sweep still holds."""


class SweepError(RuntimeError):
    """A sweep cannot continue."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: name of its folder.
        config: its settings, a dataclass; a folder with other settings raises an error.
        work: `work(config, directory, watch)` does the run, with checkpoints in `directory`, and returns its metrics as
            JSON values. It must be a module-level function, because worker processes import it.
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
    """Do all runs and return their metrics by name.

    Runs with a `metrics.json` are skipped; runs with a checkpoint resume from it. Each run uses `threads` threads, so
    results do not depend on the number of workers.

    Ctrl-C raises KeyboardInterrupt after every active run has saved a checkpoint, and starts no further run; a second
    Ctrl-C stops them immediately. SIGTERM does the same if its handler raises, and otherwise ends the program.

    Processes started together by `accelerate launch` share every run, one run after another; the first process writes.

    Args:
        runs: runs, in order.
        directory: folder with one subfolder per run.
        workers: number of simultaneous runs; 1 runs them in this process.
        threads: torch threads per run.
        watch: called with the name of a run and its progress, or None when it is done.

    Raises:
        FolderInUse: if another process uses the directory.
        SweepError: if a folder holds a run of the same name with other settings, if a run diverges, if a worker process
            dies, or if `workers` is above 1 under `accelerate launch`.
    """
    runs, launched = list(runs), processes()
    if launched.num_processes > 1 and workers > 1:
        raise SweepError(
            f"workers: expected 1 under `accelerate launch`, whose processes share each run, got {workers}"
        )
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"runs: expected distinct names, got {', '.join(names)}")
    with locked(directory if launched.is_main_process else None):
        if launched.is_main_process:
            for run in runs:
                _claim(directory / run.name, run)
        launched.wait_for_everyone()
        pending = [run for run in runs if _metrics(directory / run.name) is None]
        if workers == 1:
            for run in pending:
                _alone(run, directory / run.name, threads, lambda p, name=run.name: watch(name, p))
                watch(run.name, None)
        elif pending:
            tasks = {run.name: partial(_alone, run, directory / run.name, threads) for run in pending}
            try:
                in_parallel(tasks, workers, watch)
            except WorkerDied as error:
                raise SweepError(str(error)) from error
    done = {run.name: _metrics(directory / run.name) for run in runs}
    return {name: metrics for name, metrics in done.items() if metrics is not None}


def _claim(directory: Path, run: Run) -> None:
    """Write the settings of a run into its folder, or check that the folder already has the same."""
    path = directory / CONFIG
    config: Any = run.config
    requested = plain(asdict(config) if is_dataclass(config) and not isinstance(config, type) else config)
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write(path, requested)
        return
    try:
        stored = read_object(path)
    except ValueError as error:
        raise SweepError(f"{error}; remove {directory} to repeat the run, or choose another folder") from error
    changed = differences(stored, requested)
    if changed:
        raise SweepError(
            f"{directory} holds a run with other settings ({changed}); resume with the stored settings, choose another "
            "folder, or remove it"
        )


def _write(path: Path, value: Any) -> None:
    try:
        write_text(path, to_json(value))
    except OSError as error:
        raise SweepError(
            f"{path}: the file could not be written ({error}); the checkpoints are intact; fix this and rerun the same "
            "command to resume"
        ) from error


def _metrics(directory: Path) -> dict[str, Any] | None:
    path = directory / METRICS
    if not path.exists():
        return None
    try:
        return read_object(path)
    except ValueError as error:
        raise SweepError(f"{error}; remove the file to repeat the run") from error


def _alone(run: Run, directory: Path, threads: int, watch: Callable[[Progress], None]) -> None:
    """Do one run in this process."""
    # A worker whose sweep was killed may need a moment to notice, and leaves the folder then.
    with locked(directory if processes().is_main_process else None, patience=ORPHAN_SECONDS):
        _locked_alone(run, directory, threads, watch)


def _locked_alone(run: Run, directory: Path, threads: int, watch: Callable[[Progress], None]) -> None:
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
        _write(directory / METRICS, metrics)
        for path in checkpoint.complete_checkpoints(directory):
            shutil.rmtree(path, ignore_errors=True)
    launched.wait_for_everyone()
