"""Mixtures of several kinds of MQAR: the paper's mixtures, and pools that serve batches of one kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.data.mqar import BLOCK_SIZE, MQAR, Examples, fits, joined
from membydesign.data.seeds import generator
from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

BASE = ((64, 4), (128, 8), (128, 16), (128, 32))
"""Lengths L and pairs D of Base-MQAR; the paper does not state its own."""


@final
@dataclass(frozen=True)
class Mixture:
    """Several kinds of examples in equal shares, over one vocabulary.

    Attributes:
        kinds: distinct kinds of examples.
    """

    kinds: tuple[MQAR, ...]

    def __post_init__(self) -> None:
        some = isinstance(self.kinds, tuple) and len(self.kinds) > 0
        if not some or not all(isinstance(kind, MQAR) for kind in self.kinds):
            raise ValueError(f"kinds: expected a tuple of at least one MQAR, got {self.kinds!r}")
        if len({kind.name for kind in self.kinds}) < len(self.kinds):
            raise ValueError(f"kinds: expected distinct kinds, got {[kind.name for kind in self.kinds]}")
        if len({kind.vocab_size for kind in self.kinds}) > 1:
            raise ValueError(f"kinds: expected one vocab_size, got {[kind.vocab_size for kind in self.kinds]}")

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, V."""
        return self.kinds[0].vocab_size

    def pool(self, examples: int, split: str, seed: int) -> Pool:
        """Generate the examples of a split, such as "train", "validation" or "test".

        Args:
            examples: total number of examples of all kinds.
            split: name of the split; splits share no random stream.
            seed: random seed of the examples and of their order.
        """
        shares = self.shares(examples)
        if not isinstance(split, str):
            raise ValueError(f"split: expected a name, got {split!r}")
        check_whole_number("seed", seed, 0)
        parts = [_narrow(kind, share, split, seed) for kind, share in zip(self.kinds, shares, strict=True)]
        return Pool(self, parts, split, seed)

    def shares(self, examples: int) -> list[int]:
        """Divide a number of examples equally among the kinds; the first kinds get the remainder."""
        check_whole_number("examples", examples, len(self.kinds))
        share, more = divmod(examples, len(self.kinds))
        return [share + (i < more) for i in range(len(self.kinds))]


def _narrow(kind: MQAR, examples: int, split: str, seed: int) -> Examples:
    """Generate the examples of `kind.sample` as int32, converting block by block because pools are large."""
    blocks = range(math.ceil(examples / BLOCK_SIZE))
    return joined([kind.sample_block(b, split, seed).to(torch.int32) for b in blocks])[:examples]


@final
class Pool:
    """Examples served epoch after epoch, in batches of one kind; created by `Mixture.pool`.

    In every epoch the examples of each kind are reshuffled and divided into batches, and the batches of all kinds are
    shuffled together. Incomplete batches are dropped, with other examples in every epoch. A batch depends on its step
    only, so a run can resume at any step.
    """

    def __init__(self, mixture: Mixture, parts: Sequence[Examples], split: str, seed: int) -> None:
        self.mixture, self.parts, self.split, self.seed = mixture, tuple(parts), split, seed
        self._order: tuple[tuple[int, int], list[tuple[int, Tensor]]] | None = None

    def __len__(self) -> int:
        """Number of examples of all kinds."""
        return sum(map(len, self.parts))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Number of batches in an epoch."""
        check_whole_number("batch_size", batch_size, 1)
        fewest = min(map(len, self.parts))
        if batch_size > fewest:
            raise ValueError(f"batch_size: expected at most {fewest}, the examples of a kind, got {batch_size}")
        return sum(len(part) // batch_size for part in self.parts)

    def batch(self, step: int, batch_size: int) -> Examples:
        """Return the batch of a step, counted from the start of epoch 0."""
        check_whole_number("step", step, 0)
        epoch, index = divmod(step, self.steps_per_epoch(batch_size))
        kind, rows = self._epoch(epoch, batch_size)[index]
        return self.parts[kind][rows].to(torch.int64)

    def batches(self, epoch: int, batch_size: int) -> Iterator[Examples]:
        """Iterate over the batches of an epoch."""
        check_whole_number("epoch", epoch, 0)
        steps = self.steps_per_epoch(batch_size)
        return (self.batch(step, batch_size) for step in range(epoch * steps, (epoch + 1) * steps))

    def in_order(self, batch_size: int) -> Iterator[tuple[MQAR, Examples]]:
        """Iterate over every example once, kind by kind, for evaluation; the last batch of a kind may be smaller."""
        check_whole_number("batch_size", batch_size, 1)
        return (
            (kind, part[start : start + batch_size].to(torch.int64))
            for kind, part in zip(self.mixture.kinds, self.parts, strict=True)
            for start in range(0, len(part), batch_size)
        )

    def _epoch(self, epoch: int, batch_size: int) -> list[tuple[int, Tensor]]:
        """Return kind and rows of every batch of an epoch; the latest epoch is cached."""
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
    """Build Base-MQAR from lengths and pairs (L, D), without rewrites."""
    return Mixture(
        tuple(MQAR(L, D, vocab_size=vocab_size, shared_vocabulary=shared_vocabulary) for L, D in shapes),
    )


def update_mixture(
    lengths: Sequence[int] = (64, 128),
    pairs: Sequence[int] = (4, 16),
    parts: Sequence[int] = (1, 2, 4, 8),
    vocab_size: int = 8192,
) -> Mixture:
    """Build Update-MQAR: every L with every D and U = ⌊D/part⌋, except combinations that do not fit.

    In the paper's grid no U fits L = 64 with D = 16. An eighth of 4 keys rounds to 0, so that kind has no rewrites.
    """
    grid = [(L, D, D // part) for L in lengths for D in pairs for part in parts if fits(L, D, D // part)]
    return Mixture(tuple(MQAR(L, D, U, vocab_size=vocab_size) for L, D, U in dict.fromkeys(grid)))


def block_mixture(
    length: int = 128, block: int = 2, blocks: Sequence[int] = (1, 2, 3, 4), vocab_size: int = 8192
) -> Mixture:
    """Build Block-MQAR: 1 to 4 blocks of B keys before their values, D = B, …, 4B."""
    return Mixture(tuple(MQAR(length, block * n, block=block, vocab_size=vocab_size) for n in blocks))
