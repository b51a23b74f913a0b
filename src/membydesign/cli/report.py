"""`mbd report`: every result in a folder, as tables here or as one page to read and to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from membydesign.cli.say import AsJson, console, fail
from membydesign.experiments import page, record
from membydesign.experiments.page_html import html
from membydesign.experiments.page_markdown import markdown
from membydesign.files import to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence


def report(
    results: Annotated[Path, typer.Argument(help="The folder of results, one sub-folder for each.")] = Path("results"),
    out: Annotated[
        Path | None, typer.Option(help="Write one page of all results to this folder: report.md and report.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Every result in a folder beside the paper's number, with the command and commit that made it.

    With `--out`, one page instead: `report.md`, and `report.html`, a single file with the figures inside. Exits with 1
    if a figure is missing.
    """
    every = sorted(path.parent for path in results.glob("**/metrics.json"))
    found = [path for path in every if not _is_training_run(path)]
    if not found:
        raise fail(f"no metrics.json below {results}; make one with: mbd reproduce collision --out {results}/collision")
    try:
        records = {directory: record.read(directory) for directory in found}
    except ValueError as error:
        raise fail(str(error)) from None
    missing = [] if out is None else _write(out, results, records)
    if as_json:
        texts = {str(directory): (directory / "metrics.json").read_text(encoding="utf-8") for directory in found}
        print(to_json({directory: json.loads(text) for directory, text in texts.items()}), end="")
    elif out is None:
        for directory, each in records.items():
            _print(directory, each)
    else:
        for directory, each in records.items():
            console().print(f"{escape(str(directory))}: ", verdict_line(each.comparisons), sep="", soft_wrap=True)
        for name in ("report.md", "report.html"):
            console().print(f"  {escape(str(out / name))}", highlight=False, soft_wrap=True)
    for path in missing:
        Console(stderr=True, soft_wrap=True).print(f"[red]mbd:[/red] no figure {escape(str(path))}", highlight=False)
    if missing:
        raise typer.Exit(1)


def _is_training_run(directory: Path) -> bool:
    """Whether a folder is that of a run in a sweep, whose metrics are not those of an experiment."""
    try:
        return "provenance" not in json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # told when it is read


def _write(out: Path, results: Path, records: dict[Path, record.Record]) -> list[Path]:
    """Write both pages; returns the figures that are missing from them."""
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    if (out / "metrics.json").exists():
        raise fail(f"--out: expected a folder for the page alone, and {out} holds a result with a report of its own")
    folders = {
        results.resolve().name if directory == results else directory.relative_to(results).as_posix(): each
        for directory, each in records.items()
    }
    blocks = page.gathered(folders)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "report.md", markdown(blocks, out))
        write_text(out / "report.html", html(blocks))
    except OSError as error:
        raise fail(f"--out: expected to write a page to {out}, got an error: {error}") from None
    return [path for each in records.values() for path in each.missing_figures]


def _print(directory: Path, each: record.Record) -> None:
    made = each.provenance
    console().rule(f"[bold]{escape(str(directory))}", align="left")
    command = f"{made.command}   (preset {made.preset}, commit {made.commit[:12]})"
    console().print(escape(command), highlight=False)
    console().print(comparison_table(each.comparisons))
    console().print(verdict_line(each.comparisons), end="\n\n")


def verdict_line(comparisons: Sequence[record.Check]) -> str:
    """How many claims hold and which do not, in rich's markup."""
    colour = "red" if record.failing(comparisons) else "green"
    held, agreeing = escape(record.claims_verdict(comparisons)), record.verdict(comparisons)
    return f"[bold {colour}]{held}[/]. {agreeing} with the paper." if comparisons else f"{held}."


def comparison_table(comparisons: Sequence[record.Check]) -> Table:
    """The paper's statements beside ours, claim by claim."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "paper", "ours", "within"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("agrees")
    for claim, rows in record.by_claim(comparisons).items():
        holds = all(c.agrees for c in rows)
        mark = "[bold green]holds[/]" if holds else "[bold red]DOES NOT HOLD[/]"
        table.add_row(f"[bold]{escape(claim)}[/bold]", "", "", "", mark)
        for c in rows:
            agrees = "[green]yes[/green]" if c.agrees else "[bold red]NO[/bold red]"
            table.add_row(f"  {escape(c.quantity)}", *map(escape, c.shown()), agrees)
    return table
