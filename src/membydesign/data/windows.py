"""Windows of a token file: in a new order for every epoch for training, in order for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from membydesign.data.mqar import check_whole
from membydesign.data.seeds import generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from membydesign.data.token_files import TokenFile


@final
class Windows:
    """Non-overlapping windows of L tokens; what does not fill the last one is left out.

    Training reads one endless stream of windows: all of them in a random order, then all in another, epoch after
    epoch. A batch is the next B of it. It may begin in one epoch and end in the next, so none is left out, and the
    stream is the same for every batch size. A batch depends on the seed and its step alone: a run can go on from any
    step, and all models of a seed see the same tokens.

    Args:
        tokens: the stream of tokens.
        length: L.
        seed: of the order.
    """

    def __init__(self, tokens: TokenFile, length: int, seed: int = 0) -> None:
        check_whole("length", length, 2)
        check_whole("seed", seed, 0)
        if len(tokens) < length:
            raise ValueError(f"length: expected at most the {len(tokens):,} tokens of {tokens.path}, got {length:,}")
        self.tokens, self.length, self.seed = tokens, length, seed
        self._orders: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Windows, N."""
        return len(self.tokens) // self.length

    def steps(self, epochs: int, batch_size: int) -> int:
        """Whole batches of so many epochs."""
        check_whole("epochs", epochs, 1)
        check_whole("batch_size", batch_size, 1)
        return epochs * len(self) // batch_size

    def batch(self, step: int, batch_size: int) -> Tensor:
        """The batch of a step, counted from 0, [B,L]."""
        check_whole("step", step, 0)
        check_whole("batch_size", batch_size, 1)
        return self.stretch(step * batch_size, batch_size)

    def stretch(self, start: int, count: int) -> Tensor:
        """So many windows of the endless stream, from one on that is counted from 0, [count,L]."""
        return self.tokens.rows(self.length, self.places(start, count))

    def places(self, start: int, count: int) -> Tensor:
        """Which windows a stretch of the stream has, counted from 0 in the order of the text, [count]."""
        check_whole("start", start, 0)
        check_whole("count", count, 1)
        stop = start + count
        first, last = start // len(self), (stop - 1) // len(self)
        self._orders = {epoch: self._order(epoch) for epoch in range(first, last + 1)}
        joined = torch.cat([*self._orders.values()])
        return joined[start - first * len(self) : stop - first * len(self)]

    def in_order(self, batch_size: int) -> Iterator[Tensor]:
        """Every window once, in the order of the text, for evaluation, [B,L]: the last batch may be smaller."""
        check_whole("batch_size", batch_size, 1)
        return (
            self.tokens.rows(self.length, slice(start, start + batch_size)) for start in range(0, len(self), batch_size)
        )

    def _order(self, epoch: int) -> Tensor:
        """The order of an epoch; those of the last batch are kept."""
        if epoch in self._orders:
            return self._orders[epoch]
        return torch.randperm(len(self), generator=generator("order of windows", self.seed, epoch), device="cpu")
