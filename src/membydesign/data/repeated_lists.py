"""Repeated word lists: a curriculum that teaches small models to copy from context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from membydesign.data.seeds import generator
from membydesign.data.synthetic import SyntheticText

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = 0.25
"""Fraction of list entries that are numbers."""

DIGITS = 7
"""Maximum digits of a number."""

TIMES = (2, 4)
"""Minimum and maximum repetitions of a list."""


@final
@dataclass(frozen=True)
class RepeatedWords(SyntheticText):
    """Random word lists, each repeated two, three or four times.

    Only memory can predict the repetitions. Short lists need few and recent tokens, which a memory can recall before
    it has learned what to keep; longer lists need more (results/retrofit/NOTES.md). List lengths are log-uniform.
    Words are drawn uniformly from the distinct words of a corpus; about every fourth entry is a number of up to seven
    digits instead.

    Attributes:
        corpus: source of the words.
        count: number of documents.
        words: minimum and maximum list length.
        seed: random seed.

    Examples:
        >>> from membydesign.data.text import PythonHelp
        >>> words = next(RepeatedWords(PythonHelp(), 1, (3, 6)).documents()).split()
        >>> words == 2 * words[: len(words) // 2]
        True
    """

    kind: ClassVar[str] = "repeated words"
    words: tuple[int, int] = (2, 60)

    def documents(self) -> Iterator[str]:
        """Yield the documents."""
        vocabulary = sorted({word for text in self.corpus.documents() for word in text.split()})
        for index in range(self.count):
            source = generator("repeated words", self.seed, index)
            length = self.draw_words(source)
            words = torch.randint(len(vocabulary), (length,), generator=source).tolist()
            sizes = torch.randint(1, DIGITS + 1, (length,), generator=source).tolist()
            numbers = torch.rand(length, generator=source, dtype=torch.float64).tolist()
            is_number = (torch.rand(length, generator=source) < NUMBERS).tolist()
            entries = [
                str(int(number * 10**size)) if chosen else vocabulary[word]
                for word, size, number, chosen in zip(words, sizes, numbers, is_number, strict=True)
            ]
            times = int(torch.randint(TIMES[0], TIMES[1] + 1, (), generator=source))
            yield " ".join(entries * times)
