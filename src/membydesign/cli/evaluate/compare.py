"""`mbd evaluate compare`: compare the answers of two models to the same needle tasks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from membydesign.cli.evaluate.results import ANSWERS, options_named, show_result, write_result
from membydesign.cli.output import AsJson, fail
from membydesign.reports import record

if TYPE_CHECKING:
    from membydesign.evaluation.niah.run import Answered


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="FIRST", help="Results of one model: a folder that `mbd evaluate niah` wrote.")
    ],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Results of another model, which are subtracted.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the results. Default: runs/compare-FIRST-SECOND."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of two models to the same needle tasks.

    For example: `mbd evaluate compare runs/niah-ours runs/niah-theirs`

    Shows differences by task, length and depth, and draws the paper's heat maps; green means that the first finds
    more. Only samples that both models answered count.
    """
    from membydesign.evaluation.niah.scores import common
    from membydesign.experiments.shared.niah_figures import plot
    from membydesign.experiments.shared.niah_tables import difference_metrics, difference_tables

    names = (first.resolve().name, second.resolve().name)
    out = Path("runs") / f"compare-{names[0]}-{names[1]}" if out is None else out
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    started = time.perf_counter()
    with options_named({"seed": "--seed of both", "results": "FIRST, SECOND", "file": ANSWERS}):
        ours, theirs = common(answers_in(first), answers_in(second))
    metrics = difference_metrics(ours, theirs)
    notes = []
    if metrics["same_prompts"] < metrics["samples"]:
        notes.append(
            f"{metrics['samples'] - metrics['same_prompts']} of {metrics['samples']} samples had different prompts: "
            "another tokenizer, other essays, or another number of tokens for the answer."
        )
        Console(stderr=True, soft_wrap=True).print(f"[yellow]mbd:[/yellow] {notes[0]}", highlight=False)
    title = f"Needles found: {names[0]} minus {names[1]}"
    config = {"first": str(first), "second": str(second)}
    outcome = record.Outcome(config, [], metrics, notes, tables=difference_tables(ours, theirs))
    out.mkdir(parents=True, exist_ok=True)
    write_result(out, outcome, "compare", started, title, plot(ours, theirs, names, out))
    show_result(out, as_json)


def answers_in(source: Path) -> list[Answered]:
    """Read what `mbd evaluate niah` wrote to a folder."""
    from membydesign.evaluation.niah.run import read_answers

    file = source / ANSWERS if source.is_dir() else source
    if not file.is_file():
        raise fail(f"expected a folder with {ANSWERS}, as mbd evaluate niah writes it, got {str(source)!r}")
    return read_answers(file)
