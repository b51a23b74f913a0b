"""Find the code, emphasis and links of a note in Markdown, in time proportional to its length.

One regular expression for all of them would search the rest of the text again at each unpaired mark.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["code", "escaped", "strong", "emphasis", "link"]


class Span(NamedTuple):
    """A part of a text with a meaning in Markdown.

    Attributes:
        start: position of its first character.
        end: position after its last one.
        kind: its meaning.
        text: what is inside its marks.
        target: where a link leads; otherwise empty.
    """

    start: int
    end: int
    kind: Kind
    text: str
    target: str = ""


class _Next:
    """Find the next match of a pattern for positions that never decrease; each stretch of text is searched once."""

    def __init__(self, pattern: str, text: str) -> None:
        self._pattern, self._text, self._start = re.compile(pattern), text, -1

    def at_or_after(self, position: int) -> int:
        """Return where the next match starts, or the length of the text if there is no further one."""
        if self._start < position:
            match = self._pattern.search(self._text, position)
            self._start = len(self._text) if match is None else match.start()
        return self._start


def spans(text: str) -> Iterator[Span]:
    """Yield the spans of a note from left to right; spans inside others are found by calling this on their text."""
    mark = _Next(r"[`\\*\[]", text)
    tick, bracket, target_end = _Next("`", text), _Next(r"\]", text), _Next(r"[)\s]", text)
    closings = {"**": _Next(r"(?<=\S)\*\*", text), "*": _Next(r"(?<=\S)\*", text)}
    kinds: dict[str, Kind] = {"**": "strong", "*": "emphasis"}

    def between(i: int) -> Span | None:
        match text[i]:
            case "`":
                j = tick.at_or_after(i + 1)
                return Span(i, j + 1, "code", text[i + 1 : j]) if i + 1 < j < len(text) else None
            case "\\":
                known = i + 1 < len(text) and text[i + 1] in string.punctuation
                return Span(i, i + 2, "escaped", text[i + 1]) if known else None
            case "[":
                return link(i)
        for marks, kind in kinds.items():
            inside = i + len(marks)
            if text.startswith(marks, i) and inside < len(text) and not text[inside].isspace():
                j = closings[marks].at_or_after(inside + 1)
                if j < len(text):
                    return Span(i, j + len(marks), kind, text[inside:j])
        return None

    def link(i: int) -> Span | None:
        j = bracket.at_or_after(i + 1)
        if j == i + 1 or not text.startswith("](", j):
            return None
        end = target_end.at_or_after(j + 2)
        if end == j + 2 or not text.startswith(")", end):
            return None
        return Span(i, end + 1, "link", text[i + 1 : j], text[j + 2 : end])

    position = 0
    while (start := mark.at_or_after(position)) < len(text):
        span = between(start)
        position = start + 1 if span is None else span.end
        if span is not None:
            yield span
