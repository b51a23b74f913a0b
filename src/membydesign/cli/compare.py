"""`mbd compare`: every design on the same tasks, and what they do beyond their training length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from membydesign.cli.completion import listed_designs, studies, study_presets
from membydesign.cli.experiment_runs import Job, carry_out
from membydesign.cli.output import AsJson, console, expect_one_of, fail
from membydesign.cli.requirements import need_training
from membydesign.cli.tables import Column, Group, show_table
from membydesign.experiments import STUDIES, load
from membydesign.reports import record


def compare(
    study: Annotated[
        str, typer.Argument(metavar="[STUDY]", help=f"One of {', '.join(STUDIES)}.", autocompletion=studies)
    ] = "designs",
    preset: Annotated[str, typer.Option(metavar="NAME", help="smoke or cpu.", autocompletion=study_presets)] = "cpu",
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Designs, separated by commas. Default: all.", autocompletion=listed_designs
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of seeds. Default: the preset's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the results. Default: runs/compare-STUDY.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at a time. Default: one per core, or one with a GPU."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Skip finished runs, continue interrupted ones, add new designs."),
    ] = False,
    finished: Annotated[
        bool, typer.Option("--finished", metavar="", help="Run nothing: report what is finished so far.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare designs on the same tasks: one table, figures and a report.

    For example: `mbd compare`, or `mbd compare --preset smoke --only bayesian_layer,deltanet`

    - **designs**: every design of the catalogue, with equal budgets of state, on a collision, learned recall, more and
      more random keys, and calibration under noise that it was not told
    - **length**: gains and recall at up to 64 times the training length, with free and with stationary drift

    Presets:

    - **cpu**: settings that one core finishes in about an hour
    - **smoke**: a check that everything runs; its numbers are meaningless

    It can be stopped at any time: run the same command with `--resume` to continue, or with `--finished` for a report
    of what is there. Designs that were added to the catalogue since are then run too.
    """
    expect_one_of("STUDY", STUDIES, study)
    need_training("compare")
    module = load(study)
    expect_one_of("--preset", module.PRESETS, preset)
    config: Any = module.PRESETS[preset]
    try:
        if only is not None:
            config = replace(config, designs=tuple(only.split(",")))
        if seeds is not None:
            config = replace(config, seeds=seeds)
    except ValueError as error:
        raise fail(f"--only: {error}") from None
    folder = Path("runs") / f"compare-{study}" if out is None else out
    job = Job(study, module, preset, config, folder, title=module.TITLE)
    if carry_out(job, workers=workers, resume=resume or finished, only_finished=finished):
        _show(folder, as_json)


def _show(folder: Path, as_json: bool) -> None:
    """Print the first table of the result, and where the rest is."""
    try:
        result = record.read(folder)
    except ValueError as error:
        raise fail(str(error)) from None
    if as_json:
        print((folder / "metrics.json").read_text(encoding="utf-8"), end="")
        return
    table = result.tables[0]
    columns = [Column(heading, right=i > 1, spare=i) for i, heading in enumerate(table.headings)]
    show_table(columns, [Group([[str(cell) for cell in row] for row in table.rows])], title=table.title)
    for path in sorted(folder.glob("*.*"), key=lambda path: (path.suffix, path.name)):
        console().print(f"  {path}", highlight=False, soft_wrap=True)
