"""Padding taken out, and put back: layers see packed sequences only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Unpadded(NamedTuple):
    """Where the tokens of a padded batch are.

    Attributes:
        places: of the tokens among all B·T places, in order.
        cu_seqlens: boundaries of the B sequences, [B+1]; some may be empty.
        shape: (B, T).
    """

    places: Tensor
    cu_seqlens: Tensor
    shape: tuple[int, int]

    @staticmethod
    def of(mask: Tensor) -> Unpadded:
        """From a mask, [B,T], with ones where tokens are."""
        present = mask.bool()
        cu_seqlens = torch.nn.functional.pad(present.sum(1).cumsum(0), (1, 0))
        return Unpadded(present.flatten().nonzero().squeeze(1), cu_seqlens, (mask.shape[0], mask.shape[1]))

    def pack(self, x: Tensor) -> Tensor:
        """[B,T,…] to the tokens alone, [1,n,…]."""
        return x.flatten(0, 1)[self.places][None]

    def pad(self, x: Tensor) -> Tensor:
        """[1,n,…] back to [B,T,…], with zeros where padding is."""
        B, T = self.shape
        full = x.new_zeros(B * T, *x.shape[2:])
        return full.index_copy(0, self.places, x[0]).unflatten(0, (B, T))


def padding_of(attention_mask: Tensor | None, B: int, T: int, past: int) -> Unpadded | None:
    """The padding among the last T of past + T tokens, or None if there is none."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask: expected a tensor [B,T] = [{B},{T}], got {type(attention_mask).__name__}")
    if tuple(attention_mask.shape) not in ((B, T), (B, past + T)):
        also = f" or, with the {past} tokens of past_key_values, [{B},{past + T}]" if past else ""
        raise ValueError(f"attention_mask: expected shape [B,T] = [{B},{T}]{also}, got {list(attention_mask.shape)}")
    mask = attention_mask[:, -T:]
    return None if bool(mask.all()) else Unpadded.of(mask)
