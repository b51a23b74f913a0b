"""Padding is removed before the layers and restored after them: layers see packed sequences only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from membydesign.layers.packing import Places


class Padding(NamedTuple):
    """A padded batch as packed sequences.

    Attributes:
        places: of the tokens in the batch, [B,T].
        cu_seqlens: boundaries of the B sequences, [B+1]; some may be empty.
    """

    places: Places
    cu_seqlens: Tensor

    @staticmethod
    def of(mask: Tensor) -> Padding:
        """Read a mask, [B,T], with ones where tokens are."""
        present = mask.bool()
        cu_seqlens = torch.nn.functional.pad(present.sum(1).cumsum(0), (1, 0))
        indices = present.flatten().nonzero().squeeze(1)
        return Padding(Places(indices, (mask.shape[0], mask.shape[1])), cu_seqlens)


def padding_of(attention_mask: Tensor | None, B: int, T: int, past: int) -> Padding | None:
    """Find the padding among the last T of past + T tokens; return None if there is none."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask: expected a tensor [B,T] = [{B},{T}], got {type(attention_mask).__name__}")
    if tuple(attention_mask.shape) not in ((B, T), (B, past + T)):
        also = f" or, with the {past} tokens of past_key_values, [{B},{past + T}]" if past else ""
        raise ValueError(f"attention_mask: expected shape [B,T] = [{B},{T}]{also}, got {list(attention_mask.shape)}")
    mask = attention_mask[:, -T:]
    return None if bool(mask.all()) else Padding.of(mask)


def restarts(
    cu_seqlens: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None, past: object
) -> Tensor | None:
    """Return cu_seqlens, or boundaries where positions restart at 0; None with padding or a cache."""
    if cu_seqlens is not None or past is not None or position_ids is None or position_ids.shape[0] != 1:
        return cu_seqlens
    if isinstance(attention_mask, Tensor) and not bool(attention_mask.all()):
        return None
    starts = (position_ids[0, 1:] == 0).nonzero().squeeze(1) + 1
    if not len(starts):
        return None
    return torch.nn.functional.pad(
        torch.nn.functional.pad(starts, (1, 0), value=0), (0, 1), value=position_ids.shape[1]
    )
