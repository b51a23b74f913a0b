"""Documents that are made of another text, as many as one likes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from membydesign.data.mqar import check_whole
from membydesign.data.text import Corpus

if TYPE_CHECKING:
    from torch import Generator


@dataclass(frozen=True)
class MadeText(Corpus):
    """Documents at random, each the same whatever the count.

    Attributes:
        kind: of documents; another for other rules of making them, so that token files of older ones are made anew.
        corpus: what they are made of.
        count: how many documents there are.
        words: the fewest and the most words that a document takes from it.
        seed: another one gives other documents.
    """

    kind: ClassVar[str]
    corpus: Corpus
    count: int
    words: tuple[int, int]
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("count", self.count, 1)
        check_whole("seed", self.seed, 0)
        least, most = self.words
        if not 1 <= least <= most:
            raise ValueError(f"words: expected the fewest and the most, from 1 on, got {self.words}")

    def describe(self) -> dict[str, Any]:
        """How many of what, and the text that they are made of."""
        return {
            "kind": self.kind,
            "count": self.count,
            "words": list(self.words),
            "seed": self.seed,
            "of": self.corpus.describe(),
        }

    def draw_words(self, source: Generator) -> int:
        """How many words: the logarithm is uniform, so that few are likelier than many."""
        least, most = self.words
        return round(least * (most / least) ** torch.rand((), generator=source, dtype=torch.float64).item())
