"""What all commands print with: the console, `--json`, and errors that say what to do."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from membydesign.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection

AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON and nothing else.")]
"""The option of every command that prints a result."""

UNLIMITED = 10_000
"""A width at which no line wraps."""


def console() -> Console:
    """Return standard output, as wide as COLUMNS or the terminal, also through a pager; in files, lines do not wrap."""
    out = Console()
    return out if "COLUMNS" in os.environ or out.is_terminal or _piped_at_a_terminal() else Console(width=UNLIMITED)


def _piped_at_a_terminal() -> bool:
    """Return whether output goes to a pipe, such as `| less`, while standard error is a terminal."""
    try:
        piped = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # not a file of the operating system
        return False
    return piped and sys.stderr.isatty()


def fail(message: str) -> typer.Exit:
    """Print an error and its remedy on standard error; raise the result to exit with 2."""
    Console(stderr=True, soft_wrap=True).print(f"[red]mbd:[/red] {escape(message)}", highlight=False)
    return typer.Exit(2)


def expect_one_of(argument: str, names: Collection[str], name: str) -> None:
    """Exit with an error that lists the valid names and suggests the nearest, unless `name` is one of them."""
    if name not in names:
        raise fail(f"{argument}: expected one of {', '.join(names)}, got {name!r}{did_you_mean(name, names)}")
