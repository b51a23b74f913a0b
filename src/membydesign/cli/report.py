"""`mbd report`: every result in a folder, as tables here or as one page to read and to send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from membydesign.cli.output import AsJson, console, fail
from membydesign.cli.tables import Column, Group, show_table
from membydesign.files import read_json, to_json, write_text
from membydesign.reports import page, record
from membydesign.reports.comparison import by_claim
from membydesign.reports.page_html import html
from membydesign.reports.page_markdown import markdown

if TYPE_CHECKING:
    from membydesign.reports.verdict import Verdict

WIDEST_NUMBER = 16
"""Cells no wider than this are numbers, and stand flush right."""


def report(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="The folder that holds the folders of results.")
    ] = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write one page of all results here: report.md and report.html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the results in a folder with the paper's numbers.

    For example: `mbd report runs`, or `mbd report runs --out page`

    Each comes with the command and commit that made it; smoke runs come without verdicts. With `--out`, it writes one
    page instead: `report.md`, and `report.html`, a single file with the figures inside. Exits with 1 if a figure is
    missing.
    """
    every = sorted(path.parent for path in results.glob("**/metrics.json"))
    folders = [path for path in every if not _is_training_run(path)]
    if not folders:
        raise fail(f"no metrics.json below {results}; make one with: mbd reproduce collision --out {results}/collision")
    try:
        records = {directory: record.read(directory) for directory in folders}
    except ValueError as error:
        raise fail(str(error)) from None
    missing = [] if out is None else _write(out, results, records)
    if as_json:
        print(to_json({str(directory): read_json(directory / "metrics.json") for directory in folders}), end="")
    elif out is None:
        for directory, each in records.items():
            _print(directory, each)
    else:
        for directory, each in records.items():
            console().print(Text.assemble(f"{directory}: ", verdict_line(each)), soft_wrap=True)
        for name in ("report.md", "report.html"):
            console().print(f"  {escape(str(out / name))}", highlight=False, soft_wrap=True)
    for path in missing:
        Console(stderr=True, soft_wrap=True).print(f"[red]mbd:[/red] no figure {escape(str(path))}", highlight=False)
    if missing:
        raise typer.Exit(1)


def _is_training_run(directory: Path) -> bool:
    """Whether a folder is that of a run in a sweep, whose metrics are not those of an experiment."""
    try:
        return "provenance" not in read_json(directory / "metrics.json")
    except (OSError, ValueError, TypeError):
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
    console().print(Text(str(directory), "bold"))
    command = f"{made.command}   (preset {made.preset}, commit {made.commit[:12]})"
    console().print(escape(command), highlight=False)
    show_comparisons(each)
    console().print()


def show_comparisons(result: record.Record) -> None:
    """Print the paper's numbers and ours, claim by claim, and which claims hold."""
    if result.comparisons:
        show_table(*_table(result))
    console().print(verdict_line(result))


def verdict_line(result: record.Record) -> Text:
    """How many claims hold and which do not."""
    claims, agreeing = result.judge.claims(result.comparisons), result.judge.agreeing(result.comparisons)
    end = f". {agreeing} with the paper." if agreeing else "."
    settings = result.judge.settings if result.comparisons else ""
    return Text.assemble(_coloured(claims), f"{end} {settings}" if settings else end)


def _table(result: record.Record) -> tuple[list[Column], list[Group]]:
    judge = result.judge
    shown = [c.shown() for c in result.comparisons]
    columns = [Column("")]
    for heading, cells in zip(("paper", "ours", "within"), zip(*shown, strict=True), strict=True):
        columns.append(Column(heading, right=max(map(len, cells)) <= WIDEST_NUMBER))
    groups = []
    for claim, rows in by_claim(result.comparisons).items():
        cells = [[c.quantity, *c.shown(), *([_coloured(judge.row(c))] if judge.tests else [])] for c in rows]
        groups.append(Group(cells, Text.assemble((claim, "bold"), "  ", _coloured(judge.claim(rows)))))
    return [*columns, *([Column("agrees")] if judge.tests else [])], groups


def _coloured(verdict: Verdict) -> Text:
    return Text(verdict.text, {True: "green", False: "bold red", None: "dim"}[verdict.good])
