"""Lists of words that are said again: from them a small model learns to look back at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from membydesign.data.made import MadeText
from membydesign.data.seeds import generator

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = 0.25
"""The share of numbers among the words of a list."""

DIGITS = 7
"""Of the longest numbers."""

TIMES = (2, 4)
"""How often a list is said, at least and at most."""


@final
@dataclass(frozen=True)
class RepeatedWords(MadeText):
    """Lists of words at random, each said two, three or four times.

    Nothing but memory tells what comes next in a list that is said again. Short lists ask for few tokens that are not
    long ago, which memories can do before they have learned what to keep, and longer ones for more (docs/retrofit.md).
    The logarithms of their lengths are uniform. A word is any of a corpus, all equally likely; every fourth or so is a
    number instead, of up to seven digits.

    Attributes:
        corpus: where words come from.
        count: how many documents there are.
        words: the fewest and the most words of a list.
        seed: another one gives other documents.

    Example:
        >>> from membydesign.data.text import PythonHelp
        >>> said = next(RepeatedWords(PythonHelp(), 1, (3, 6)).documents()).split()
        >>> said == 2 * said[: len(said) // 2]
        True
    """

    kind: ClassVar[str] = "repeated words"
    words: tuple[int, int] = (2, 60)

    def documents(self) -> Iterator[str]:
        """The documents, each the same whatever the count."""
        known = sorted({word for text in self.corpus.documents() for word in text.split()})
        for index in range(self.count):
            source = generator("repeated words", self.seed, index)
            length = self.draw_words(source)
            words = torch.randint(len(known), (length,), generator=source).tolist()
            sizes = torch.randint(1, DIGITS + 1, (length,), generator=source).tolist()
            numbers = torch.rand(length, generator=source, dtype=torch.float64).tolist()
            is_number = (torch.rand(length, generator=source) < NUMBERS).tolist()
            said = [
                str(int(number * 10**size)) if chosen else known[word]
                for word, size, number, chosen in zip(words, sizes, numbers, is_number, strict=True)
            ]
            times = int(torch.randint(TIMES[0], TIMES[1] + 1, (), generator=source))
            yield " ".join(said * times)
