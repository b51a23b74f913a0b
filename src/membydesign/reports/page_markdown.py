"""Render a page of results as GitHub-flavoured Markdown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from membydesign.reports.page import Code, Contents, Facts, Figure, Grid, Heading, Link, Mark, Notes, Paragraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.reports.page import Block, Inline, Item, Note

# An underscore inside a word, as in k_B, is just that; elsewhere it could be emphasis.
_SPECIAL = re.compile(r"[\\`*\[\]<|~#]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
# The target of a link to a file: not a web address, an anchor, or an absolute path.
_FILE = re.compile(r"\]\((?![a-z]+:|[#/])([^)\s#]+)")


def markdown(blocks: Sequence[Block], directory: Path) -> str:
    """Render the page; figures are linked relative to `directory`, where it will be written."""
    return "\n\n".join(_block(block, directory) for block in blocks) + "\n"


def plain(text: str) -> str:
    """Put a text on one line and escape every character that has a meaning in Markdown."""
    return _SPECIAL.sub(lambda special: "\\" + special[0], " ".join(text.split()))


def _block(block: Block, directory: Path) -> str:
    match block:
        case Heading():
            anchor = f'<a id="{block.anchor}"></a>\n\n' if block.anchor else ""
            return f"{anchor}{'#' * block.level} {plain(block.text)}"
        case Paragraph():
            return "".join(map(_inline, block.parts))
        case Facts():
            return "\n".join(f"- {plain(name)}: {_inline(value)}" for name, value in block.items.items())
        case Figure():
            return _figure(block, directory)
        case Grid():
            return _grid(block) + (f"\n\n{_note(block.note, directory)}" if block.note else "")
        case Notes():
            return "\n".join(f"- {_note(note, directory)}".replace("\n", "\n  ") for note in block.items)
        case Contents():
            return "\n".join(line for item in block.items for line in _lines(item, 0))


def _inline(part: Inline) -> str:
    match part:
        case Mark():
            return plain(part.text) if part.good is None else f"**{plain(part.text)}**"
        case Link():
            return f"[{plain(part.text)}](#{part.anchor})"
        case Code():
            return _code(part.text)
        case str():
            # Spaces at the ends of a piece separate it from its neighbours.
            start, end = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
            return f"{start}{plain(part)}{end}" if part.strip() else part


def _code(text: str) -> str:
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{' '.join(text.split())}{pad}{fence}"


def _figure(figure: Figure, directory: Path) -> str:
    caption = plain(figure.caption)
    if not figure.path.is_file():
        return f"**FIGURE MISSING: {plain(figure.path.name)}**\n\n*{caption}*"
    return f"![{caption}]({quote(_relative(figure.path, directory))})\n\n*{caption}*"


def _relative(path: Path, directory: Path) -> str:
    return Path(os.path.relpath(path.resolve(), directory.resolve())).as_posix()


def _note(note: Note, directory: Path) -> str:
    """Render a note, with its links to files made relative to `directory`."""
    return _FILE.sub(lambda link: f"]({_relative(note.directory / link[1], directory)}", note.text.strip())


def _grid(grid: Grid) -> str:
    lines = [_row([plain(heading) for heading in grid.headings]), _row(["---:" if r else "---" for r in grid.right])]
    lines += [_row([_cell(cell) for cell in row]) for row in grid.rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Inline) -> str:
    if isinstance(cell, Mark) and cell.good is not False:  # a column of good marks need not shout
        return plain(cell.text)
    if isinstance(cell, Code):
        return _inline(cell).replace("|", "\\|")
    return _inline(cell)


def _lines(item: Item, depth: int) -> list[str]:
    line = f"{'  ' * depth}- {''.join(map(_inline, item.parts))}"
    return [line, *(below for each in item.below for below in _lines(each, depth + 1))]
