"""`mbd reproduce`: reproduce a claim of the paper."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from membydesign.cli.completion import experiments, presets, variants
from membydesign.cli.output import AsJson, console, expect_one_of, fail
from membydesign.cli.report import show_comparisons
from membydesign.cli.requirements import need_training
from membydesign.cli.stopping import resumable
from membydesign.errors import FilterError
from membydesign.experiments import EXACT, EXPERIMENTS, load
from membydesign.experiments.shared.run_context import RunContext
from membydesign.files import read_json, to_json
from membydesign.reports import record
from membydesign.reports.provenance import Provenance, commit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from membydesign import training


def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(metavar="EXPERIMENT", help=f"One of {', '.join(EXPERIMENTS)}.", autocompletion=experiments),
    ],
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="smoke, cpu or paper; mqar also has cpu-long.", autocompletion=presets)
    ] = "paper",
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For mqar: base, update or block. Default: base.", autocompletion=variants),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the results. Default: runs/EXPERIMENT.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For wikitext and retrofit: folder of the cpu preset's texts and essays."),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For retrofit: the model to distil, a folder or a name on the Hugging Face Hub. "
            "Default: the preset's.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of seeds. Default: the preset's.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Training runs at a time. Default: one per core, or one with a GPU."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Skip finished runs and continue interrupted ones.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a claim of the paper: its numbers and ours, figures and a report.

    For example: `mbd reproduce collision`, or `mbd reproduce recall --preset smoke`

    - **collision**: overwriting and its closed forms; exact, takes seconds
    - **recall**: models learn to recall under collisions and are tested far beyond their training
    - **crowding**: more random keys than a memory has dimensions
    - **mqar**: multi-query associative recall with a shared vocabulary; see `--variant`
    - **wikitext**: language models from scratch; perplexity on tokens that only a memory can predict
    - **retrofit**: Bayesian Layers distilled into a pretrained Gated DeltaNet; needles and perplexity by length

    Presets:

    - **paper**: the paper's settings to the letter
    - **cpu**: settings that two cores finish in hours
    - **smoke**: a one-minute check that the pipeline runs; its numbers are meaningless and no claim is judged

    Training can be stopped at any time: run the same command with `--resume` to reach the same numbers. To share
    each run of wikitext and retrofit among several GPUs:
    `accelerate launch --multi_gpu --module membydesign.cli reproduce …`

    Exits with 1 if a number disagrees with the paper.
    """
    module, config = _chosen(experiment, preset, {"variant": variant, "seeds": seeds, "teacher": teacher})
    variant = getattr(config, "variant", None)
    named = "-".join(filter(None, (experiment, variant)))
    out = Path("runs") / named if out is None else out
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    launched, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    if resume and _finished(out, preset, config):
        if first:
            _show(out, as_json)
        return
    if first and not resume and (out / "runs").exists():  # the others wait for the first before they make anything
        raise fail(f"--out: {out} holds training runs; continue them with --resume, or name another folder")
    started = time.perf_counter()
    commit()  # cached now, because the checkout may change while the experiment runs
    workers = workers or (1 if launched > 1 or torch.accelerator.is_available() else os.cpu_count() or 1)
    trains = experiment not in EXACT
    with (
        _owned(out) if trains and first else nullcontext(),
        resumable() if trains else nullcontext(),
        _Bars(shown=first) as bars,
    ):
        context = RunContext(out, workers, bars.stage, bars.total, bars.watch, data)
        try:
            outcome = module.run(config, context)
        except _refusals() as error:
            raise fail(str(error)) from None
        if not first:
            return
        bars.stage("figures")
        figures = module.plot(outcome, out)
        provenance = Provenance.now(experiment, preset, time.perf_counter() - started)
        record.write(out, outcome, provenance, f"{module.TITLE} ({variant})" if variant else module.TITLE, figures)
    _show(out, as_json)


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


def _chosen(experiment: str, preset: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """The module of an experiment and its settings, with what options change."""
    expect_one_of("EXPERIMENT", EXPERIMENTS, experiment)
    if experiment not in EXACT:
        need_training(f"reproduce {experiment}")
    module = load(experiment)
    expect_one_of("--preset", module.PRESETS, preset)
    config: Any = module.PRESETS[preset]
    known = {each.name for each in fields(config)}
    chosen = {name: value for name, value in changes.items() if value is not None}
    if chosen.get("seeds") == 1 and "seeds" not in known:
        del chosen["seeds"]
    for name, value in chosen.items():
        if name not in known:
            raise fail(f"--{name}: {experiment} has no {name} to choose: expected no --{name}, got {value!r}")
    try:
        return module, replace(config, **chosen)
    except ValueError as error:
        raise fail(f"--{error}") from None


def _refusals() -> tuple[type[Exception], ...]:
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


def _finished(directory: Path, preset: str, config: Any) -> bool:
    expected = json.loads(to_json({"preset": preset, **asdict(config)}))
    try:
        return (directory / "metrics.json").exists() and read_json(directory / "config.json") == expected
    except (OSError, ValueError):
        return False


def _show(directory: Path, as_json: bool) -> None:
    """Print the result of a run; exit with 1 if a number disagrees."""
    try:
        result = record.read(directory)
    except ValueError as error:
        raise fail(str(error)) from None
    if as_json:
        print((directory / "metrics.json").read_text(encoding="utf-8"), end="")
    else:
        show_comparisons(result)
        for path in sorted(directory.glob("*.*"), key=lambda path: (path.suffix, path.name)):
            console().print(f"  {path}", highlight=False, soft_wrap=True)
    if result.judge.claims(result.comparisons).good is False:
        raise typer.Exit(1)
