"""Windows of a token file: reshuffled every epoch for training, in text order for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from membydesign.data.seeds import generator
from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from membydesign.data.token_files import TokenFile


@final
class Windows:
    """Non-overlapping windows of L tokens; an incomplete last window is dropped.

    Training reads one endless stream of windows, reshuffled every epoch. A batch is the next B windows of it and may
    span two epochs, so no window is dropped and the stream is the same for every batch size. A batch depends only on
    the seed and its step: a run can resume at any step, and all models with the same seed see the same tokens.

    Args:
        tokens: token stream.
        length: window length L.
        seed: random seed of the order.
    """

    def __init__(self, tokens: TokenFile, length: int, seed: int = 0) -> None:
        check_whole_number("length", length, 2)
        check_whole_number("seed", seed, 0)
        if len(tokens) < length:
            raise ValueError(f"length: expected at most the {len(tokens):,} tokens of {tokens.path}, got {length:,}")
        self.tokens, self.length, self.seed = tokens, length, seed
        self._orders: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.tokens) // self.length

    def steps(self, epochs: int, batch_size: int) -> int:
        """Number of complete batches in a number of epochs."""
        check_whole_number("epochs", epochs, 1)
        check_whole_number("batch_size", batch_size, 1)
        return epochs * len(self) // batch_size

    def batch(self, step: int, batch_size: int) -> Tensor:
        """Return the batch of a step, counted from 0, [B,L]."""
        check_whole_number("step", step, 0)
        check_whole_number("batch_size", batch_size, 1)
        return self.stretch(step * batch_size, batch_size)

    def stretch(self, start: int, count: int) -> Tensor:
        """Return `count` windows of the endless stream, beginning with number `start`, [count,L]."""
        return self.tokens.rows(self.length, self.places(start, count))

    def places(self, start: int, count: int) -> Tensor:
        """Return the positions in the text, counted from 0, of the windows in a stretch of the stream, [count]."""
        check_whole_number("start", start, 0)
        check_whole_number("count", count, 1)
        stop = start + count
        first, last = start // len(self), (stop - 1) // len(self)
        self._orders = {epoch: self._order(epoch) for epoch in range(first, last + 1)}
        joined = torch.cat([*self._orders.values()])
        return joined[start - first * len(self) : stop - first * len(self)]

    def in_order(self, batch_size: int) -> Iterator[Tensor]:
        """Iterate over every window once in text order, for evaluation, [B,L]; the last batch may be smaller."""
        check_whole_number("batch_size", batch_size, 1)
        return (
            self.tokens.rows(self.length, slice(start, start + batch_size)) for start in range(0, len(self), batch_size)
        )

    def _order(self, epoch: int) -> Tensor:
        """Return the order of an epoch; the orders used by the latest batch are cached."""
        if epoch in self._orders:
            return self._orders[epoch]
        return torch.randperm(len(self), generator=generator("order of windows", self.seed, epoch), device="cpu")
