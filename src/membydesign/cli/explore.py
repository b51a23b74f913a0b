"""`mbd explore`: a page that shows how designs of memory differ, or what a model's memories know while it reads."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from membydesign import __version__, pretrained
from membydesign.cli.output import console, fail
from membydesign.explore import page, text_page
from membydesign.files import write_text

DEFAULT = f"{pretrained.PREFIX}characters"


def explore(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Show a model that reads a text: a folder, a name on the Hugging Face Hub, or example:characters.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text that it reads, in UTF-8. Default: one that comes with an example."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")] = Path("explorer.html"),
    no_open: Annotated[
        bool, typer.Option("--no-open", metavar="", help="Only write the page; do not open a browser.")
    ] = False,
) -> None:
    """Write and open a page on which to drag keys, or on which a model reads a text.

    For example: `mbd explore`, `mbd explore --model example:characters`, or `mbd explore --text letter.txt --no-open`

    Without a model it shows what two overlapping keys do to several designs of memory, and walks through the paper's
    collision. With a model (`--text` alone takes example:characters) it shows how unsure each head's reads are and how
    strongly it writes, token by token. Either page is a single file that needs no network.
    """
    if out.is_dir():
        raise fail(f"--out: expected a file, and {out} is a folder: try --out {out / 'explorer.html'}")
    made = page(__version__) if model is None and text is None else _reading(model or DEFAULT, text)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, made)
    except OSError as error:
        raise fail(f"--out: expected to write a page to {out}, got an error: {error}") from None
    console().print(escape(str(out)), highlight=False, soft_wrap=True)
    if not no_open and not webbrowser.open(out.resolve().as_uri()):
        console().print("No browser was found; open the file in one.", highlight=False)


def _reading(model: str, file: Path | None) -> str:
    """Let a model read a text, and return the page."""
    from membydesign.cli.requirements import need_models

    need_models("explore --model")
    from membydesign.cli.loading import load_model, load_tokenizer, located
    from membydesign.explore.text import read
    from membydesign.models.quiet import quiet

    source = located(model) or model
    own = Path(source) / pretrained.TEXT
    if file is None and not own.is_file():
        raise fail(f"--text: expected a text file, since {model} comes with none")
    try:
        text = (file or own).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"--text: expected a text file in UTF-8, got an error: {error}") from None
    quiet()
    try:
        reading = read(load_model(source, None, "cpu").eval(), load_tokenizer(source), text, model)
    except ValueError as error:
        raise fail(str(error)) from None
    if reading.left_out:
        shown = len(reading.tokens)
        console().print(
            f"The page shows the first {shown} of {shown + reading.left_out} tokens, so that it stays below 1 MB.",
            highlight=False,
        )
    return text_page(__version__, reading.as_dict())
