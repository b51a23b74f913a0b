"""Kinds of MQAR side by side: the paper's mixtures, and pools of their examples in batches of one kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.data.mqar import BLOCK_SIZE, MQAR, Examples, check_whole, fits, joined
from membydesign.data.seeds import generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

BASE = ((64, 4), (128, 8), (128, 16), (128, 32))
"""Lengths L and pairs D of Base-MQAR, for which the paper gives none."""


@final
@dataclass(frozen=True)
class Mixture:
    """Kinds of examples with equal shares, over one vocabulary.

    Attributes:
        kinds: all different.
    """

    kinds: tuple[MQAR, ...]

    def __post_init__(self) -> None:
        some = isinstance(self.kinds, tuple) and len(self.kinds) > 0
        if not some or not all(isinstance(kind, MQAR) for kind in self.kinds):
            raise ValueError(f"kinds: expected a tuple of at least one MQAR, got {self.kinds!r}")
        if len({kind.name for kind in self.kinds}) < len(self.kinds):
            raise ValueError(f"kinds: expected different ones, got {[kind.name for kind in self.kinds]}")
        if len({kind.vocab_size for kind in self.kinds}) > 1:
            raise ValueError(f"kinds: expected one vocab_size, got {[kind.vocab_size for kind in self.kinds]}")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.kinds[0].vocab_size

    def pool(self, examples: int, split: str, seed: int) -> Pool:
        """Make the examples of a split, such as "train", "validation" or "test".

        Args:
            examples: of all kinds together.
            split: its name; splits share no random stream.
            seed: of the examples and of their order.
        """
        shares = self.shares(examples)
        if not isinstance(split, str):
            raise ValueError(f"split: expected a name, got {split!r}")
        check_whole("seed", seed, 0)
        parts = [_narrow(kind, share, split, seed) for kind, share in zip(self.kinds, shares, strict=True)]
        return Pool(self, parts, split, seed)

    def shares(self, examples: int) -> list[int]:
        """How many of so many examples each kind has: as many as the others, the first ones perhaps one more."""
        check_whole("examples", examples, len(self.kinds))
        share, more = divmod(examples, len(self.kinds))
        return [share + (i < more) for i in range(len(self.kinds))]


def _narrow(kind: MQAR, examples: int, split: str, seed: int) -> Examples:
    """The examples of `kind.sample` in 32 bits, converted as they come: pools are large."""
    blocks = range(math.ceil(examples / BLOCK_SIZE))
    return joined([kind.sample_block(b, split, seed).to(torch.int32) for b in blocks])[:examples]


@final
class Pool:
    """Examples that are visited epoch after epoch, in batches of one kind.

    Examples of a kind are shuffled anew for every epoch, cut into batches, and the batches of all kinds are shuffled
    together. What does not fill a last batch of a kind is left out, other examples in every epoch. A batch depends on
    nothing but its step, so that a run can go on from any.

    Made by `Mixture.pool`.
    """

    def __init__(self, mixture: Mixture, parts: Sequence[Examples], split: str, seed: int) -> None:
        self.mixture, self.parts, self.split, self.seed = mixture, tuple(parts), split, seed
        self._order: tuple[tuple[int, int], list[tuple[int, Tensor]]] | None = None

    def __len__(self) -> int:
        """Examples of all kinds."""
        return sum(map(len, self.parts))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Batches of an epoch."""
        check_whole("batch_size", batch_size, 1)
        fewest = min(map(len, self.parts))
        if batch_size > fewest:
            raise ValueError(f"batch_size: expected at most {fewest}, the examples of a kind, got {batch_size}")
        return sum(len(part) // batch_size for part in self.parts)

    def batch(self, step: int, batch_size: int) -> Examples:
        """The batch of a step, counted from the first of epoch 0."""
        check_whole("step", step, 0)
        epoch, index = divmod(step, self.steps_per_epoch(batch_size))
        kind, rows = self._epoch(epoch, batch_size)[index]
        return self.parts[kind][rows].to(torch.int64)

    def batches(self, epoch: int, batch_size: int) -> Iterator[Examples]:
        """The batches of an epoch, in their order."""
        check_whole("epoch", epoch, 0)
        steps = self.steps_per_epoch(batch_size)
        return (self.batch(step, batch_size) for step in range(epoch * steps, (epoch + 1) * steps))

    def in_order(self, batch_size: int) -> Iterator[tuple[MQAR, Examples]]:
        """Every example once, kind by kind, for evaluation: the last batch of a kind may be smaller."""
        check_whole("batch_size", batch_size, 1)
        return (
            (kind, part[start : start + batch_size].to(torch.int64))
            for kind, part in zip(self.mixture.kinds, self.parts, strict=True)
            for start in range(0, len(part), batch_size)
        )

    def _epoch(self, epoch: int, batch_size: int) -> list[tuple[int, Tensor]]:
        """The kind and the rows of every batch of an epoch; the last epoch asked for is kept."""
        if self._order is None or self._order[0] != (epoch, batch_size):
            source = generator("order of mqar", self.split, self.seed, epoch)
            ordered = [
                (kind, rows)
                for kind, part in enumerate(self.parts)
                for rows in torch.randperm(len(part), generator=source, device="cpu").split(batch_size)
                if len(rows) == batch_size
            ]
            shuffled = [ordered[i] for i in torch.randperm(len(ordered), generator=source, device="cpu").tolist()]
            self._order = (epoch, batch_size), shuffled
        return self._order[1]


def base_mixture(
    shapes: Sequence[tuple[int, int]] = BASE, vocab_size: int = 8192, shared_vocabulary: bool = True
) -> Mixture:
    """Base-MQAR: lengths and pairs (L, D), no rewrites."""
    return Mixture(
        tuple(MQAR(L, D, vocab_size=vocab_size, shared_vocabulary=shared_vocabulary) for L, D in shapes),
    )


def update_mixture(
    lengths: Sequence[int] = (64, 128),
    pairs: Sequence[int] = (4, 16),
    parts: Sequence[int] = (1, 2, 4, 8),
    vocab_size: int = 8192,
) -> Mixture:
    """Update-MQAR: every L with every D and U = ⌊D/part⌋, apart from those that do not fit.

    Of the paper's grid no U fits L = 64 with D = 16, and an eighth of 4 keys is none: there a kind has no rewrites.
    """
    grid = [(L, D, D // part) for L in lengths for D in pairs for part in parts if fits(L, D, D // part)]
    return Mixture(tuple(MQAR(L, D, U, vocab_size=vocab_size) for L, D, U in dict.fromkeys(grid)))


def block_mixture(
    length: int = 128, block: int = 2, blocks: Sequence[int] = (1, 2, 3, 4), vocab_size: int = 8192
) -> Mixture:
    """Block-MQAR: 1 to 4 blocks of B keys before their values, D = B, …, 4B."""
    return Mixture(tuple(MQAR(length, block * n, block=block, vocab_size=vocab_size) for n in blocks))
