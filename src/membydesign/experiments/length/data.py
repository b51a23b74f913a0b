"""Recall among random fillers: pairs of a key and a value, many other tokens, and queries at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

NOTHING = -100
"""The label of tokens that nothing is asked of."""


class Batch(NamedTuple):
    """A batch of sequences; the last N tokens are queries.

    Attributes:
        ids: tokens, [B,T].
        labels: at each key that was written before, its value as a token; elsewhere `NOTHING`, [B,T].
        new: whether a token is the value of a key that was not written before, [B,T].
    """

    ids: Tensor
    labels: Tensor
    new: Tensor


@dataclass(frozen=True, kw_only=True)
class Fillers:
    """N keys with a value each, written as pairs "key value" among random filler tokens, then each key once more.

    Keys of a sequence differ. Tokens are numbered: first all keys, then values, then fillers.

    Attributes:
        pairs: N.
        writes: how often each pair is written, in random order.
        keys: distinct keys of the vocabulary.
        values: distinct values.
        fillers: distinct fillers; few, as fillers are in texts, so that most of a memory stays unwritten.
    """

    pairs: int = 8
    writes: int = 4
    keys: int = 32
    values: int = 32
    fillers: int = 4

    @property
    def vocabulary(self) -> int:
        """Number of distinct tokens."""
        return self.keys + self.values + self.fillers

    @property
    def shortest(self) -> int:
        """Tokens of all pairs and queries."""
        return self.pairs * (2 * self.writes + 1)

    def sample(self, examples: int, length: int, rng: Generator, *, window: int | None = None) -> Batch:
        """Draw sequences.

        Args:
            examples: batch size B.
            length: T.
            rng: random generator.
            window: pairs are among the last so many tokens; None for anywhere.
        """
        B, N, W = examples, self.pairs, self.pairs * self.writes
        window = length if window is None else window
        if not self.shortest <= window <= length:
            raise ValueError(f"window: expected from {self.shortest} to length = {length}, got {window}")
        units = window - N - W  # a pair is one unit, a filler another
        chosen = torch.rand(B, units, generator=rng).argsort(1)[:, :W].sort(1).values
        places = length - window + chosen + torch.arange(W)  # each pair before shifts the next ones by a token
        keys = torch.rand(B, self.keys, generator=rng).argsort(1)[:, :N]
        values = self.keys + torch.randint(self.values, (B, N), generator=rng)
        written = torch.arange(N).repeat(self.writes)[torch.rand(B, W, generator=rng).argsort(1)]
        queried = torch.rand(B, N, generator=rng).argsort(1)
        ids = self.keys + self.values + torch.randint(self.fillers, (B, length), generator=rng)
        ids.scatter_(1, places, keys.gather(1, written)).scatter_(1, places + 1, values.gather(1, written))
        ids[:, -N:] = keys.gather(1, queried)
        before = (written[:, :, None] == written[:, None]).tril(-1).any(2)
        labels = torch.full_like(ids, NOTHING)
        labels.scatter_(1, places, values.gather(1, written).where(before, NOTHING))
        labels[:, -N:] = values.gather(1, queried)
        new = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, places + 1, ~before)
        return Batch(ids, labels, new)
