"""Recall among random fillers: a few pairs of a key and a value, many other tokens, and queries at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

Placement = Literal["anywhere", "recent"]


class Batch(NamedTuple):
    """A batch of sequences; the last N tokens are queries.

    Attributes:
        ids: tokens, [B,T].
        answers: the value of each queried key, as a token, [B,N].
    """

    ids: Tensor
    answers: Tensor


@dataclass(frozen=True, kw_only=True)
class Fillers:
    """N pairs "key value" among random filler tokens, then each key once more.

    Keys of a sequence differ. Tokens are numbered: first all keys, then values, then fillers.

    Attributes:
        pairs: N.
        keys: distinct keys of the vocabulary.
        values: distinct values.
        fillers: distinct fillers.
    """

    pairs: int = 8
    keys: int = 32
    values: int = 32
    fillers: int = 32

    @property
    def vocabulary(self) -> int:
        """Number of distinct tokens."""
        return self.keys + self.values + self.fillers

    def sample(self, examples: int, length: int, rng: Generator, *, window: int | None = None) -> Batch:
        """Draw sequences.

        Args:
            examples: batch size B.
            length: T.
            rng: random generator.
            window: pairs are among the last so many tokens; None for anywhere.
        """
        B, N = examples, self.pairs
        window = length if window is None else window
        if not 3 * N <= window <= length:
            raise ValueError(f"window: expected from {3 * N} (pairs and queries) to length = {length}, got {window}")
        units = window - 2 * N  # a pair is one unit, a filler another
        chosen = torch.rand(B, units, generator=rng).argsort(1)[:, :N].sort(1).values
        places = length - window + chosen + torch.arange(N)  # each pair before shifts the next ones by a token
        keys = torch.rand(B, self.keys, generator=rng).argsort(1)[:, :N]
        values = self.keys + torch.randint(self.values, (B, N), generator=rng)
        ids = self.keys + self.values + torch.randint(self.fillers, (B, length), generator=rng)
        ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
        order = torch.rand(B, N, generator=rng).argsort(1)
        ids[:, -N:] = keys.gather(1, order)
        return Batch(ids, values.gather(1, order))
