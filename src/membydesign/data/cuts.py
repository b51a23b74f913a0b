"""How text is cut into documents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HEADING = re.compile(r"\s*= (?!=).*(?<!=) =\s*")
"""A line with the title of a WikiText article: one `=` on each side, where sections have two or more."""

BLANK = " \n"
"""WikiText's own blank line."""


def whole(pieces: Iterable[str]) -> Iterator[str]:
    """Every piece (a file, a row of a dataset) is a document; blank ones are left out."""
    return (piece for piece in pieces if piece.strip())


def articles(pieces: Iterable[str]) -> Iterator[str]:
    r"""WikiText's articles: a document begins with the blank line before a title.

    A title is a line ` = Title = ` between blank lines; formulas that are broken over lines look like one otherwise.
    Documents one after another are the text again, without loss. Text before the first title is a document, unless it
    is blank: then it belongs to the first article.

    Args:
        pieces: whole files, or lines one by one, as the Hub has them; an empty piece is a blank line, since the Hub's
            copy of WikiText has empty rows where the files have " \n".

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
    """Lines with their ends; unlike `str.splitlines`, only "\\n" ends one."""
    for piece in pieces:
        if not piece:
            yield BLANK
            continue
        *complete, last = piece.split("\n")
        for line in complete:
            yield line + "\n"
        if last:
            yield last


CUTS: dict[str, Callable[[Iterable[str]], Iterator[str]]] = {"whole": whole, "articles": articles}
"""The ways to cut, by name."""


def check_cut(cut: str | None) -> None:
    """Refuse a name that is none of `CUTS`; None is fine."""
    if cut is not None and cut not in CUTS:
        raise ValueError(f"cut: expected one of {', '.join(CUTS)}, got {cut!r}")
