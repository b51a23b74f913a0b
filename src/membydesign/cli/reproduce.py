"""`mbd reproduce`: reproduce a claim of the paper."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from membydesign.cli.completion import experiments, presets, variants
from membydesign.cli.experiment_runs import Job, carry_out
from membydesign.cli.output import AsJson, console, expect_one_of, fail
from membydesign.cli.report import show_comparisons
from membydesign.cli.requirements import need_training
from membydesign.experiments import EXACT, EXPERIMENTS, load
from membydesign.reports import record


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
    job = Job(
        experiment,
        module,
        preset,
        config,
        Path("runs") / named if out is None else out,
        title=f"{module.TITLE} ({variant})" if variant else module.TITLE,
        trains=experiment not in EXACT,
    )
    if carry_out(job, workers=workers, resume=resume, data=data):
        _show(job.out, as_json)


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
