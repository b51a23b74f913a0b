"""Haystacks in which needles are hidden: RULER's noise, essays of one's own, and text that every Python carries."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from membydesign.evaluation.text import EMBEDDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

DEPTHS: tuple[int, ...] = tuple(round(100 * i / 39) for i in range(40))
"""Where RULER hides needles in essays: 40 depths, evenly spaced and rounded, in per cent of the sentences."""

_ENDING = re.compile(r"""[.!?]+["'”’)\]]*$""")
_OPENING = re.compile(r"""["'“‘(\[]*[A-Z0-9]""")
_ABBREVIATION = re.compile(r"\(?([A-Z]|[a-z]\.[a-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|No|Fig)\.$")


class Haystack(ABC):
    """Text of any length, and places in it for needles.

    Its length is counted in units: lines of noise, or words of essays. Class attributes say what a unit is, how many
    there must be at least, and by what needles are set apart.
    """

    name: str
    unit: str
    least: int
    separator: str

    @abstractmethod
    def text(self, start: int, stop: int) -> str:
        """Units from `start` up to `stop`, from whose tokens the length is guessed."""

    @abstractmethod
    def draw_depths(self, needles: int, units: int, source: Generator) -> list[float]:
        """Depths of so many needles in a haystack of so many units, in no order, from 0 (first) to 1 (last)."""

    @abstractmethod
    def hide(self, needles: Sequence[str], depths: Sequence[float], units: int) -> str:
        """The first units of the haystack with needles at depths that increase."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The same for the same text."""


@final
class Noise(Haystack):
    """One line of five short sentences, again and again; a needle stands before the line that its depth names."""

    name, unit, least, separator = "noise", "lines", 5, "\n"

    def text(self, start: int, stop: int) -> str:
        """Lines."""
        return "\n".join([NOISE] * (stop - start))

    def draw_depths(self, needles: int, units: int, source: Generator) -> list[float]:
        """Lines without replacement, each as likely as any other."""
        return [line / units for line in torch.randperm(units, generator=source)[:needles].tolist()]

    def hide(self, needles: Sequence[str], depths: Sequence[float], units: int) -> str:
        """Needles are lines of their own."""
        lines = [NOISE] * units
        for needle, depth in reversed(list(zip(needles, depths, strict=True))):
            lines.insert(round(depth * units), needle)
        return "\n".join(lines)

    @property
    def fingerprint(self) -> str:
        """Of the line."""
        return _digest(NOISE)


@final
class Essays(Haystack):
    """Words of a text, from its beginning, and from its beginning again where it is too short.

    A needle at depth δ stands before sentence ⌊δS⌋ of the S sentences that the words make.

    Args:
        text: prose; white space of all kinds counts as one space.
        name: what to call it.
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
        """Words."""
        size = len(self.words)
        if stop <= size:
            return " ".join(self.words[start:stop])
        return " ".join([self.words[i % size] for i in range(start, stop)])

    def sentences(self, units: int) -> int:
        """How many sentences the first words make; the last may be cut short."""
        rounds, rest = divmod(units, len(self.words))
        return rounds * len(self._starts) + bisect_left(self._starts, rest)

    def start_of(self, sentence: int) -> int:
        """The word with which a sentence begins."""
        rounds, rest = divmod(sentence, len(self._starts))
        return rounds * len(self.words) + self._starts[rest]

    def draw_depths(self, needles: int, units: int, source: Generator) -> list[float]:
        """Without replacement from RULER's 40 depths, whatever the length."""
        del units
        return [DEPTHS[i] / 100 for i in torch.randperm(len(DEPTHS), generator=source)[:needles].tolist()]

    def hide(self, needles: Sequence[str], depths: Sequence[float], units: int) -> str:
        """Needles stand between sentences.

        As in RULER a space stands on either side of every needle, also where no sentence does: one at the very
        beginning follows a space, and two at one place have two between them.
        """
        sentences, parts, start = self.sentences(units), [], 0
        for needle, depth in zip(needles, depths, strict=True):
            stop = min(self.start_of(int(sentences * depth)), units)
            parts += [self.text(start, stop), needle]
            start = stop
        return " ".join([*parts, self.text(start, units)])

    @property
    def fingerprint(self) -> str:
        """Of the words."""
        return _digest(" ".join(self.words))


def _ends(word: str, following: str) -> bool:
    """Whether a sentence ends with a word."""
    return bool(_ENDING.search(word) and _OPENING.match(following) and not _ABBREVIATION.match(word))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def embedded_prose() -> str:
    """Sentences of Python's own help, `pydoc_data.topics`, without code, tables and headings: English, 15,000 words.

    Releases of Python differ in it, which fingerprints tell.
    """
    from pydoc_data.topics import topics

    kept: dict[str, None] = {}  # sentences that several topics share come once
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            lines = paragraph.strip("\n").splitlines()
            # Code and grammar are indented, headings are underlined, and bullets begin with a star.
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
    """A haystack from where a user says.

    Args:
        source: "embedded", a file, or a folder, of which all .txt and .json are taken in the order of their names.
            JSON is RULER's PaulGrahamEssays.json, `{"text": …}`; every other file is plain text.
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
        found = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"essays: expected UTF-8 text, or JSON, in {str(file)!r}, got {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ValueError(f'essays: expected JSON with {{"text": "…"}} in {str(file)!r}, got something else')
    return found["text"]
