"""Tables that fit the terminal: fewer columns where it is narrow, and a list where no table fits.

A table fits if neither a word nor a short cell has to be broken, and no cell is taller than `TALLEST` lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.console import Group as Together
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from membydesign.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

GAP = INDENT = 2
TALLEST = 3
SHORT = 11
"""Cells no wider than this stay on one line."""
READABLE = 36
"""Values stand next to their names if this much width, or all that they need, is left; otherwise below."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: what it shows.
        right: whether its cells are flush right, as numbers are.
        spare: if above 0, a narrow table may leave it out; the column with the largest number goes first.
    """

    heading: str
    right: bool = False
    spare: int = 0


@dataclass(frozen=True)
class Group:
    """Rows that belong together.

    Attributes:
        rows: cells, one for each column; a string is plain text, in which brackets mean nothing.
        title: the line above them, if any.
    """

    rows: Sequence[Sequence[str | Text]]
    title: Text = field(default_factory=Text)


class Layout(NamedTuple):
    """Which columns a table has, by index, and how wide each is."""

    columns: list[int]
    widths: list[int]


def show_table(columns: Sequence[Column], groups: Sequence[Group], *, title: str = "", caption: str = "") -> None:
    """Print groups of rows under shared columns: as a table, or as a list if the terminal is too narrow for one."""
    out = console()
    indent = INDENT if any(group.title for group in groups) else 0
    cells = [[[_text(cell) for cell in row] for row in group.rows] for group in groups]
    layout = layout_of(columns, [row for rows in cells for row in rows], out.width - indent)
    if title:
        out.print(Text(title, "bold"))
    if layout is not None:
        out.print(Padding(_table(columns, layout, [], header=True), (0, 0, 0, indent), expand=False))
    for group, rows in zip(groups, cells, strict=True):
        if group.title:
            out.print(group.title)
        shown = _list(columns, rows, out.width - indent) if layout is None else _table(columns, layout, rows)
        out.print(Padding(shown, (0, 0, 0, indent), expand=False))
    hidden = [] if layout is None else [c.heading for i, c in enumerate(columns) if i not in layout.columns]
    if hidden:
        out.print(Text(f"Not shown in so narrow a terminal: {', '.join(hidden)}.", "dim"))
    if caption:
        out.print(Text(caption, "dim"))


def show_facts(title: str, facts: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print named values, each of one line or more; long lines continue under their own beginning."""
    out = console()
    indented = INDENT + max(len(name) for name, _ in facts) + GAP
    needed = max(cell_len(line) for _, lines in facts for line in lines)
    stacked = out.width - indented < min(needed, READABLE)
    left = 2 * INDENT if stacked else indented
    for piece in Text(title).wrap(out, out.width):
        print(piece.plain.rstrip())
    for name, lines in facts:
        label = " " * INDENT + name
        if stacked:
            print(label)
            label = ""
        for line in lines:
            for piece in Text(line).wrap(out, max(1, out.width - left)):
                print(f"{label:<{left}}{piece.plain.rstrip()}")
                label = ""


def layout_of(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Layout | None:
    """The table with as many of the columns as fit; None if even those that are needed do not."""
    kept = list(range(len(columns)))
    while True:
        widths = _widths([columns[i].heading for i in kept], [[row[i] for row in rows] for i in kept], width)
        if widths is not None:
            return Layout(kept, widths)
        first = max(kept, key=lambda i: columns[i].spare)
        if not columns[first].spare:
            return None
        kept.remove(first)


def _widths(headings: Sequence[str], columns: Sequence[Sequence[Text]], width: int) -> list[int] | None:
    """A width for each column of cells; None if they do not fit."""
    free = width - GAP * (len(columns) - 1)
    named = list(zip(headings, columns, strict=True))
    full = [max([cell_len(heading), *(cell.cell_len for cell in cells)]) for heading, cells in named]
    widths = [max([_narrowest(heading), *map(_narrowest_cell, cells)]) for heading, cells in named]
    if sum(widths) > free:
        return None
    for _ in range(free - sum(widths)):  # what is left goes, step by step, to the column that lacks most
        lacking = max(range(len(widths)), key=lambda i: full[i] - widths[i])
        if widths[lacking] >= full[lacking]:
            break
        widths[lacking] += 1
    return widths


def _narrowest_cell(cell: Text) -> int:
    return cell.cell_len if cell.cell_len <= SHORT else _narrowest(cell.plain)


def _narrowest(text: str) -> int:
    """Return the least width that breaks no word and needs at most `TALLEST` lines."""
    words = [cell_len(word) for word in text.split()]
    width = max(words, default=0)
    while _lines(words, width) > TALLEST:
        width += 1
    return width


def _lines(words: Sequence[int], width: int) -> int:
    """How many lines words of these widths take."""
    lines, used = 1, 0
    for word in words:
        if used and used + 1 + word > width:
            lines, used = lines + 1, word
        else:
            used += word + bool(used)
    return lines


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


def _table(columns: Sequence[Column], layout: Layout, rows: Sequence[Sequence[Text]], *, header: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=header)
    for i, width in zip(*layout, strict=True):
        table.add_column(Text(columns[i].heading), width=width, justify="right" if columns[i].right else "left")
    for row in rows:
        table.add_row(*(row[i] for i in layout.columns))
    return table


def _list(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Together:
    """A paragraph for each row: its first cell, and below it the others with their headings."""
    lines: list[RenderableType] = []
    for first, *others in rows:
        lines.append(Text.assemble(first, style="bold"))
        pairs = [
            Text.assemble((f"{column.heading}: ", "dim"), cell)
            for column, cell in zip(columns[1:], others, strict=True)
            if cell.plain not in ("", "—")
        ]
        lines += [Padding(line, (0, 0, 0, INDENT), expand=False) for line in _filled(pairs, width - INDENT)]
    return Together(*lines)


def _filled(pieces: Sequence[Text], width: int) -> list[Text]:
    """Pieces one after another, with a new line where the next would not fit whole."""
    lines: list[Text] = []
    for i, piece in enumerate(pieces):
        ended = Text.assemble(piece, ";") if i < len(pieces) - 1 else piece
        if lines and lines[-1].cell_len + 1 + ended.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], " ", ended)
        else:
            lines.append(ended)
    return lines
