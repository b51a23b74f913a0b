"""Sequences of different lengths side by side, for layers whose state grows: their ends are aligned.

A row begins with as many empty places, all zeros, as it is shorter than the longest. New tokens then go to the same
place of every row, its end.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from membydesign.ops.checks import check_cu_seqlens


class Rows(NamedTuple):
    """Where packed sequences stand as rows of a batch.

    Attributes:
        lengths: tokens of each sequence, [N].
        longest: the largest of them, L.
        even: whether all are equally long, so that no place is empty.
        place: of each packed token in [N·L], [T].
    """

    lengths: Tensor
    longest: int
    even: bool
    place: Tensor

    @staticmethod
    def of(cu_seqlens: Tensor | None, x: Tensor) -> Rows | None:
        """The rows of x, [1,T,...]; refuses bad boundaries. None without boundaries."""
        if cu_seqlens is None:
            return None
        bounds = check_cu_seqlens(cu_seqlens, x)
        lengths = [end - start for start, end in pairwise(bounds)]
        longest = max(lengths)
        each = torch.tensor(lengths, device=x.device)
        ends = torch.arange(1, len(lengths) + 1, device=x.device) * longest
        shift = torch.repeat_interleave(ends - each.cumsum(0), each, output_size=x.shape[1])
        return Rows(each, longest, min(lengths) == longest, torch.arange(x.shape[1], device=x.device) + shift)

    def spread(self, x: Tensor) -> Tensor:
        """Packed tokens, [1,T,...], to rows, [N,L,...]."""
        empty = x.new_zeros(len(self.lengths) * self.longest, *x.shape[2:])
        return empty.index_copy(0, self.place, x[0]).unflatten(0, (-1, self.longest))

    def packed(self, x: Tensor) -> Tensor:
        """Rows, [N,L,...], to packed tokens, [1,T,...]."""
        return x.flatten(0, 1).index_select(0, self.place)[None]


def after(past: Tensor | None, new: Tensor, rows: Rows | None) -> Tensor:
    """What a layer keeps, [N,S,...], and then the new tokens, [N,L,...]: [N,S+L,...], the ends aligned again."""
    if past is None:
        return new
    both = torch.cat((past.to(new.dtype), new), 1)
    if rows is None or rows.even:
        return both
    # The empty places between the old and the new tokens of a row go to its front.
    S = past.shape[1]
    gap = (rows.longest - rows.lengths)[:, None]
    j = torch.arange(both.shape[1], device=new.device)
    source = torch.where(j < gap, S + j, torch.where(j < S + gap, j - gap, j))
    return both[torch.arange(len(both), device=new.device)[:, None], source]
