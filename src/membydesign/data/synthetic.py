"""Synthetic documents generated from a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from membydesign.data.text import Corpus
from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from torch import Generator


@dataclass(frozen=True)
class SyntheticText(Corpus):
    """Randomly generated documents; document i does not depend on how many there are.

    Attributes:
        kind: name of the generator; it changes when the generator does, so that outdated token files are rebuilt.
        corpus: source text.
        count: number of documents.
        words: minimum and maximum number of words that a document takes from the corpus.
        seed: random seed.
    """

    kind: ClassVar[str]
    corpus: Corpus
    count: int
    words: tuple[int, int]
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number("count", self.count, 1)
        check_whole_number("seed", self.seed, 0)
        least, most = self.words
        if not 1 <= least <= most:
            raise ValueError(f"words: expected 1 <= minimum <= maximum, got {self.words}")

    def describe(self) -> dict[str, Any]:
        """Describe the generator and its source text."""
        return {
            "kind": self.kind,
            "count": self.count,
            "words": list(self.words),
            "seed": self.seed,
            "of": self.corpus.describe(),
        }

    def draw_words(self, source: Generator) -> int:
        """Draw a number of words, log-uniformly: small numbers are more likely than large ones."""
        least, most = self.words
        return round(least * (most / least) ** torch.rand((), generator=source, dtype=torch.float64).item())
