"""Render a page of results as one self-contained HTML file: figures are embedded, and no script runs."""

from __future__ import annotations

import mimetypes
import struct
from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

from membydesign.reports.page import Code, Contents, Facts, Figure, Grid, Heading, Link, Mark, Notes, Paragraph
from membydesign.reports.spans import spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.reports.page import Block, Inline, Item

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #6a7079; --line: #d9dce1; --band: #f4f5f7;
  --link: #0b57a4; --good: #14692f; --good-band: #e2f3e7; --bad: #a3131d; --bad-band: #fde5e6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #16181b; --soft: #9ba1aa; --line: #353a41; --band: #202328;
    --link: #7db7f2; --good: #7fd79a; --good-band: #163322; --bad: #ff9a9f; --bad-band: #451a1d; } }
body { margin: 0 auto; padding: 2rem 1.25rem 5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { margin-top: 2rem; }
a { color: var(--link); }
dd, code { overflow-wrap: anywhere; }
code { font: 0.9em ui-monospace, monospace; background: var(--band); padding: 0.1em 0.3em; border-radius: 3px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--band); }
.right { text-align: right; }
.badge { display: inline-block; padding: 0 0.5em; border: 1px solid; border-radius: 4px; font-size: 0.85rem;
  font-weight: 600; line-height: 1.5; color: var(--soft); background: var(--band); }
.good { color: var(--good); background: var(--good-band); }
.bad { color: var(--bad); background: var(--bad-band); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; font-size: 0.92rem; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; }
figure { margin: 1.5rem 0; max-width: max-content; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption, .note { color: var(--soft); font-size: 0.92rem; max-width: 46rem; }
figcaption { margin-top: 0.5rem; }
figcaption b { color: var(--ink); }
nav ul { padding-left: 1.2rem; }
nav li { margin: 0.3rem 0; }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""


def html(blocks: Sequence[Block], title: str = "Results") -> str:
    """Render the page; its first heading, or else `title`, is the title of the browser tab."""
    if blocks and isinstance(blocks[0], Heading):
        title = blocks[0].text
    head = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
    ]
    return "\n".join([*head, *map(_block, blocks), "</body>", "</html>"]) + "\n"


def note(text: str) -> str:
    """Render the code, emphasis and web links of a note in Markdown; the rest is plain text."""
    pieces, done = [], 0
    for piece in spans(text):
        pieces.append(escape(text[done : piece.start]))
        done = piece.end
        match piece.kind:
            case "code":
                pieces.append(f"<code>{escape(piece.text)}</code>")
            case "escaped":
                pieces.append(escape(piece.text))
            case "strong":
                pieces.append(f"<strong>{note(piece.text)}</strong>")
            case "emphasis":
                pieces.append(f"<em>{note(piece.text)}</em>")
            case "link" if piece.target.startswith(("https://", "http://")):
                pieces.append(f'<a href="{escape(piece.target)}">{note(piece.text)}</a>')
            case "link":  # to a file in the result folder, which is out of reach once the page is sent to someone
                pieces.append(note(piece.text))
    return "".join([*pieces, escape(text[done:])])


def _block(block: Block) -> str:
    match block:
        case Heading():
            anchor = f' id="{escape(block.anchor)}"' if block.anchor else ""
            return f"<h{block.level}{anchor}>{escape(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p>{_line(block.parts)}</p>"
        case Facts():
            facts = (f"<dt>{escape(name)}</dt><dd>{_inline(value)}</dd>" for name, value in block.items.items())
            return "\n".join(["<dl>", *facts, "</dl>"])
        case Figure():
            return _figure(block)
        case Grid():
            return _grid(block)
        case Notes():
            return "\n".join(["<ul>", *(f"<li>{note(item.text)}</li>" for item in block.items), "</ul>"])
        case Contents():
            return f"<nav>\n{_list(block.items)}\n</nav>"


def _inline(part: Inline) -> str:
    match part:
        case Mark():
            kind = {True: "badge good", False: "badge bad", None: "badge"}[part.good]
            return f'<span class="{kind}">{escape(part.text)}</span>'
        case Link():
            return f'<a href="#{escape(part.anchor)}">{escape(part.text)}</a>'
        case Code():
            return f"<code>{escape(part.text)}</code>"
        case str():
            return escape(part)


def _line(parts: Sequence[Inline]) -> str:
    return "".join(map(_inline, parts))


def _figure(figure: Figure) -> str:
    caption = f"<figcaption>{_caption(figure.caption)}</figcaption>"
    if not figure.path.is_file():
        missing = _inline(Mark(False, f"FIGURE MISSING: {figure.path.name}"))
        return f"<figure>{missing}{caption}</figure>"
    kind = mimetypes.guess_type(figure.path.name)[0] or "image/png"
    image = figure.path.read_bytes()
    data = b64encode(image).decode("ascii")
    return (
        f'<figure><img alt="{escape(figure.caption)}"{_size(image)} src="data:{kind};base64,{data}">{caption}</figure>'
    )


def _caption(text: str) -> str:
    """Set a caption's first sentence, or what comes before its first colon, in bold, and end it with a full stop."""
    text = text if text.endswith((".", "!", "?")) else f"{text}."
    first, end, rest = min((text.partition(mark) for mark in (". ", ": ")), key=lambda parts: len(parts[0]))
    return f"<b>{escape(first)}{end.strip()}</b> {escape(rest)}".strip() if rest else f"<b>{escape(text)}</b>"


def _size(image: bytes) -> str:
    """Return the attributes that show a PNG at its size in inches, so that all figures have letters of one size."""
    signature, header = b"\x89PNG\r\n\x1a\n", 24
    if not image.startswith(signature) or len(image) < header:
        return ""
    width, height = struct.unpack(">II", image[16:header])
    place = image.find(b"pHYs", header, 4096)
    if place < 0 or image[place + 12 : place + 13] != b"\x01":  # dots per metre are not known
        return ""
    per_metre = struct.unpack(">I", image[place + 4 : place + 8])[0]
    scale = 96 / (0.0254 * per_metre) if per_metre else 1.0
    return f' width="{round(scale * width)}" height="{round(scale * height)}"'


def _grid(grid: Grid) -> str:
    align = [' class="right"' if right else "" for right in grid.right]
    head = "".join(f"<th{a}>{escape(heading)}</th>" for a, heading in zip(align, grid.headings, strict=True))
    rows = (
        f"<tr>{''.join(f'<td{a}>{_inline(cell)}</td>' for a, cell in zip(align, row, strict=True))}</tr>"
        for row in grid.rows
    )
    table = ["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *rows, "</tbody>", "</table>"]
    below = [f'<p class="note">{note(grid.note.text)}</p>'] if grid.note else []
    return "\n".join(['<div class="wide">', *table, "</div>", *below])


def _list(items: Sequence[Item]) -> str:
    lines = (f"<li>{_line(item.parts)}{_list(item.below) if item.below else ''}</li>" for item in items)
    return "\n".join(["<ul>", *lines, "</ul>"])
