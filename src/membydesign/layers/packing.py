"""Packed sequences, [1,T,...], as rows of a batch and back.

Layers whose state grows align the ends of the rows: a row begins with as many empty places, all zeros, as it is shorter
than the longest. New tokens then go to the same place of every row, its end.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from membydesign.filter.checks import check_cu_seqlens


class Places(NamedTuple):
    """The places of packed tokens in a batch of rows, [N,L].

    Attributes:
        indices: of each token among all N·L places, [T].
        shape: (N, L).
    """

    indices: Tensor
    shape: tuple[int, int]

    def spread(self, x: Tensor) -> Tensor:
        """Put packed tokens, [1,T,...], into rows, [N,L,...], with zeros in empty places."""
        N, L = self.shape
        return x.new_zeros(N * L, *x.shape[2:]).index_copy(0, self.indices, x[0]).unflatten(0, self.shape)

    def pack(self, x: Tensor) -> Tensor:
        """Take the tokens out of rows, [N,L,...]: [1,T,...]."""
        return x.flatten(0, 1).index_select(0, self.indices)[None]


class Rows(NamedTuple):
    """Packed sequences as rows whose ends are aligned.

    Attributes:
        lengths: tokens of each sequence, [N].
        even: whether all are equally long, so that no place is empty.
        places: where their tokens go.
    """

    lengths: Tensor
    even: bool
    places: Places

    @staticmethod
    def of(cu_seqlens: Tensor | None, x: Tensor) -> Rows | None:
        """Lay out the rows of x, [1,T,...], after checking its boundaries; return None without boundaries."""
        if cu_seqlens is None:
            return None
        bounds = check_cu_seqlens(cu_seqlens, x)
        counts = [end - start for start, end in pairwise(bounds)]
        longest = max(counts)
        lengths = torch.tensor(counts, device=x.device)
        ends = torch.arange(1, len(counts) + 1, device=x.device) * longest
        indices = shifted(lengths, ends - lengths.cumsum(0), x.shape[1])
        return Rows(lengths, min(counts) == longest, Places(indices, (len(counts), longest)))


def shifted(lengths: Tensor, by: Tensor, count: int) -> Tensor:
    """Return the positions of packed tokens, each moved by the number of its sequence.

    Args:
        lengths: tokens of each sequence, [N].
        by: how far to move those of each sequence, [N].
        count: tokens of all sequences, T.
    """
    return torch.arange(count, device=by.device) + torch.repeat_interleave(by, lengths, output_size=count)


def after(past: Tensor | None, new: Tensor, rows: Rows | None) -> Tensor:
    """Append new tokens, [N,L,...], to those that a layer keeps, [N,S,...], and align the ends again: [N,S+L,...]."""
    if past is None:
        return new
    both = torch.cat((past.to(new.dtype), new), 1)
    if rows is None or rows.even:
        return both
    # The empty places between the old and the new tokens of a row go to its front.
    S = past.shape[1]
    gap = (new.shape[1] - rows.lengths)[:, None]
    j = torch.arange(both.shape[1], device=new.device)
    source = torch.where(j < gap, S + j, torch.where(j < S + gap, j - gap, j))
    return both[torch.arange(len(both), device=new.device)[:, None], source]
