"""Split text into documents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HEADING = re.compile(r"\s*= (?!=).*(?<!=) =\s*")
"""The title line of a WikiText article: one `=` on each side; section headings have two or more."""

BLANK = " \n"
"""WikiText's blank line."""


def whole(pieces: Iterable[str]) -> Iterator[str]:
    """Make every piece (a file, a dataset row) one document; skip blank ones."""
    return (piece for piece in pieces if piece.strip())


def articles(pieces: Iterable[str]) -> Iterator[str]:
    r"""Split WikiText into articles, each beginning with the blank line before its title.

    A title is a line ` = Title = ` between blank lines; without that condition, formulas broken over lines would look
    like titles. Concatenating the documents restores the text exactly. Text before the first title is a document of
    its own; blank text there belongs to the first article.

    Args:
        pieces: whole files, or single lines as on the Hub. An empty piece is a blank line, because the Hub's copy of
            WikiText has empty rows where the files have " \n".

    Examples:
        >>> list(articles([" \n = A = \n \n It is . \n \n = = B = = \n \n \n = C = \n \n So . \n"]))
        [' \n = A = \n \n It is . \n \n = = B = = \n \n', ' \n = C = \n \n So . \n']
    """
    document: list[str] = []
    lines = _lines(pieces)
    line = next(lines, None)
    while line is not None:
        following = next(lines, None)
        after_blank = not document or not document[-1].strip()
        if HEADING.fullmatch(line) and after_blank and (following is None or not following.strip()):
            before = [document.pop()] if document else []
            if "".join(document).strip():
                yield "".join(document)
                document = []
            document += before
        document.append(line)
        line = following
    if "".join(document).strip():
        yield "".join(document)


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield lines including their ends; unlike `str.splitlines`, only "\\n" ends a line."""
    for piece in pieces:
        if not piece:
            yield BLANK
            continue
        *complete, last = piece.split("\n")
        for line in complete:
            yield line + "\n"
        if last:
            yield last


SPLITTERS: dict[str, Callable[[Iterable[str]], Iterator[str]]] = {"whole": whole, "articles": articles}
"""Functions that split text into documents, by name."""


def check_cut(cut: str | None) -> None:
    """Raise an error unless `cut` is None or a name in `SPLITTERS`."""
    if cut is not None and cut not in SPLITTERS:
        raise ValueError(f"cut: expected one of {', '.join(SPLITTERS)}, got {cut!r}")
