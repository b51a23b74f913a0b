"""Packed sequences as Transformers describes them, and functions that run on each of them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def boundaries(length: int, options: dict[str, Any]) -> list[int] | None:
    """Where packed sequences begin, and the end of the last; None if there is one sequence only.

    Args:
        length: tokens in the row.
        options: keyword arguments of one of Transformers' functions. `cu_seqlens` or `cu_seq_lens_q` lists the
            boundaries, [N+1]; `seq_idx` gives the number of each token's sequence, [1,T].
    """
    bounds = options.get("cu_seqlens")
    if bounds is None:
        bounds = options.get("cu_seq_lens_q")
    if bounds is not None:
        found = [int(i) for i in bounds.tolist()]
        name = "cu_seqlens"
    elif (numbers := options.get("seq_idx")) is not None:
        if numbers.ndim != 2 or numbers.shape[0] != 1:
            raise ValueError(f"seq_idx: expected shape [1,T], since one row is packed, got {list(numbers.shape)}")
        changes = (torch.nonzero(numbers[0, 1:] != numbers[0, :-1]).flatten() + 1).tolist()
        found, name = [0, *changes, numbers.shape[1]], "seq_idx"
    else:
        return None
    if found[0] != 0 or found[-1] != length or any(b <= a for a, b in pairwise(found)):
        raise ValueError(
            f"{name}: expected increasing boundaries from 0 to {length}, the number of tokens, got {found}"
        )
    return found if len(found) > 2 else None


def pieces(bounds: list[int], tensors: tuple[Tensor, ...], axis: int = 1) -> Iterator[tuple[Tensor, ...]]:
    """The part of each packed sequence in all tensors."""
    for start, end in pairwise(bounds):
        yield tuple(x.narrow(axis, start, end - start) for x in tensors)


def each(
    bounds: list[int] | None,
    run: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over a batch, or over each packed sequence; return outputs and one final state per sequence.

    Args:
        bounds: what `boundaries` returned.
        run: from the tensors of a sequence and its initial state or None to output [B,T,...] and final state [B,...].
        tensors: [B,T,...].
        initial: initial states [B or N,...].
    """
    if bounds is None:
        return run(*tensors, initial)
    count = len(bounds) - 1
    if tensors[0].shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected a batch of one packed row, got {tensors[0].shape[0]} rows")
    if initial is not None and initial.shape[0] != count:
        raise ValueError(f"initial_state: expected one per packed sequence, {count}, got {initial.shape[0]}")
    starts = [None] * count if initial is None else initial.split(1)
    results = [run(*piece, start) for piece, start in zip(pieces(bounds, tensors), starts, strict=True)]
    outputs, states = zip(*results, strict=True)
    return torch.cat(outputs, 1), torch.cat(states)
