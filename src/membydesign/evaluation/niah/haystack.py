"""Haystacks in which needles are hidden: RULER's noise, a user's essays, or text that ships with every Python."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from membydesign.evaluation.text import EMBEDDED
from membydesign.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

DEPTHS: tuple[int, ...] = tuple(round(100 * i / 39) for i in range(40))
"""RULER's 40 needle depths in essays, evenly spaced and rounded, in per cent of the sentences."""

# A search starts only where a run of marks starts, so that long runs take linear time.
_ENDING = re.compile(r"""(?<![.!?])[.!?]+["'”’)\]]*$""")
_OPENING = re.compile(r"""["'“‘(\[]*[A-Z0-9]""")
_ABBREVIATION = re.compile(r"\(?([A-Z]|[a-z]\.[a-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|No|Fig)\.$")


class Haystack(ABC):
    """Text of any length in which needles can be hidden.

    Its length is counted in units: lines of noise, or words of essays. Class attributes name the unit, the minimum
    number of units, and the separator around needles.
    """

    name: str
    unit: str
    least: int
    separator: str

    @abstractmethod
    def text(self, start: int, stop: int) -> str:
        """Return the units from `start` up to `stop`, from whose tokens lengths are estimated."""

    @abstractmethod
    def draw_depths(self, needles: int, units: int, source: Generator) -> list[float]:
        """Draw depths of needles in a haystack of `units` units, unsorted, from 0 (first) to 1 (last)."""

    @abstractmethod
    def hide(self, needles: Sequence[str], depths: Sequence[float], units: int) -> str:
        """Return the first units of the haystack with needles at increasing depths."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the text."""


@final
class Noise(Haystack):
    """One line of five short sentences, repeated; a needle precedes the line at its depth."""

    name, unit, least, separator = "noise", "lines", 5, "\n"

    def text(self, start: int, stop: int) -> str:
        """Return lines of noise."""
        return "\n".join([NOISE] * (stop - start))

    def draw_depths(self, needles: int, units: int, source: Generator) -> list[float]:
        """Draw lines uniformly without replacement."""
        return [line / units for line in torch.randperm(units, generator=source)[:needles].tolist()]

    def hide(self, needles: Sequence[str], depths: Sequence[float], units: int) -> str:
        """Insert needles as separate lines."""
        lines = [NOISE] * units
        for needle, depth in reversed(list(zip(needles, depths, strict=True))):
            lines.insert(round(depth * units), needle)
        return "\n".join(lines)

    @property
    def fingerprint(self) -> str:
        """Hash of the line."""
        return _digest(NOISE)


@final
class Essays(Haystack):
    """The words of a text from its beginning, repeated if it is too short.

    A needle at depth δ precedes sentence ⌊δS⌋ of the S sentences.

    Args:
        text: prose; any white space counts as one space.
        name: name of the haystack.
    """

    unit, least, separator = "words", 50, " "

    def __init__(self, text: str, name: str = "essays") -> None:
        self.name = name
        self.words = text.split()
        if not self.words:
            raise ValueError(f"text: expected at least one word in {name}, got none")
        last = len(self.words) - 1
        ends = (i for i in range(last) if _ends(self.words[i], self.words[i + 1]))
        self._starts = [0, *(i + 1 for i in ends)]

    def text(self, start: int, stop: int) -> str:
        """Return words of the text."""
        size = len(self.words)
        if stop <= size:
            return " ".join(self.words[start:stop])
        return " ".join([self.words[i % size] for i in range(start, stop)])

    def sentences(self, units: int) -> int:
        """Count the sentences in the first words; the last may be incomplete."""
        rounds, rest = divmod(units, len(self.words))
        return rounds * len(self._starts) + bisect_left(self._starts, rest)

    def start_of(self, sentence: int) -> int:
        """Return the index of the first word of a sentence."""
        rounds, rest = divmod(sentence, len(self._starts))
        return rounds * len(self.words) + self._starts[rest]

    def draw_depths(self, needles: int, units: int, source: Generator) -> list[float]:
        """Draw from RULER's 40 depths without replacement, whatever the length."""
        del units
        return [DEPTHS[i] / 100 for i in torch.randperm(len(DEPTHS), generator=source)[:needles].tolist()]

    def hide(self, needles: Sequence[str], depths: Sequence[float], units: int) -> str:
        """Insert needles between sentences.

        As in RULER, every needle has a space on either side, even without a neighbouring sentence: a needle at the very
        beginning follows a space, and two needles at one place have two spaces between them.
        """
        sentences, parts, start = self.sentences(units), [], 0
        for needle, depth in zip(needles, depths, strict=True):
            stop = min(self.start_of(int(sentences * depth)), units)
            parts += [self.text(start, stop), needle]
            start = stop
        return " ".join([*parts, self.text(start, units)])

    @property
    def fingerprint(self) -> str:
        """Hash of the words."""
        return _digest(" ".join(self.words))


def _ends(word: str, following: str) -> bool:
    """Whether a word ends a sentence, given the following word."""
    return bool(_ENDING.search(word) and _OPENING.match(following) and not _ABBREVIATION.match(word))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def embedded_prose() -> str:
    """Extract sentences from Python's own help, `pydoc_data.topics`, without code, tables and headings.

    About 15,000 words of English. They differ between Python releases, and so do their fingerprints.
    """
    from pydoc_data.topics import topics

    kept: dict[str, None] = {}  # a dictionary, so that sentences shared by several topics appear once
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            lines = paragraph.strip("\n").splitlines()
            # Code and grammar are indented, headings are underlined, and bullets start with an asterisk.
            if not lines or any(line.startswith((" ", "*", "=", "-", ">")) or "::=" in line for line in lines):
                continue
            words = " ".join(lines).replace("- ", "-").split()  # lines also break after hyphens
            start = 0
            for i, word in enumerate(words):
                if i + 1 == len(words) or _ends(word, words[i + 1]):
                    sentence = " ".join(words[start : i + 1])
                    start = i + 1
                    if re.fullmatch(r"[A-Z][^{}\[\]<>=\\|_]*[a-z)\"][.!?]", sentence) and sentence.count(" ") > 3:
                        kept.setdefault(sentence)
    return " ".join(kept)


def read_essays(source: str | Path) -> Essays:
    """Read a haystack from a user's source.

    Args:
        source: "embedded", a file, or a folder whose .txt and .json files are read in the order of their names. JSON
            files have the form of RULER's PaulGrahamEssays.json, `{"text": …}`; all other files are plain text.
    """
    if str(source) == EMBEDDED:
        return Essays(embedded_prose(), EMBEDDED)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"essays: expected {EMBEDDED!r}, a file or a folder, got no such path {str(source)!r}")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (".txt", ".json") and file.is_file())
        if not files:
            raise ValueError(f"essays: expected .txt or .json files in {str(path)!r}, got none")
    text = "\n".join(map(_read, files))
    if not text.split():
        raise ValueError(f"essays: expected words in {str(source)!r}, got none")
    return Essays(text, path.name)


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix.lower() != ".json":
            return text
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"essays: expected UTF-8 text, or JSON, in {str(file)!r}, got {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise ValueError(f'essays: expected JSON with {{"text": "…"}} in {str(file)!r}, got something else')
    return content["text"]
