"""`mbd explore`: a page that shows how designs of memory differ, computed in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from membydesign import __version__
from membydesign.cli.output import console, fail
from membydesign.explore import page
from membydesign.files import write_text


def explore(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")] = Path("explorer.html"),
    no_open: Annotated[
        bool, typer.Option("--no-open", metavar="", help="Only write the page; do not open a browser.")
    ] = False,
) -> None:
    """Write and open a page on which to drag keys, noises and writes.

    For example: `mbd explore`, or `mbd explore --out page/explorer.html --no-open`

    It shows what two overlapping keys do to several designs of memory, and walks through the paper's collision. The
    page is a single file that runs the library's C kernel as WebAssembly; it needs no network.
    """
    if out.is_dir():
        raise fail(f"--out: expected a file, and {out} is a folder: try --out {out / 'explorer.html'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page(__version__))
    except OSError as error:
        raise fail(f"--out: expected to write a page to {out}, got an error: {error}") from None
    console().print(escape(str(out)), highlight=False, soft_wrap=True)
    if not no_open and not webbrowser.open(out.resolve().as_uri()):
        console().print("No browser was found; open the file in one.", highlight=False)
