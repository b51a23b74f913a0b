"""Tensors with the same values and other strides; what lies between their elements is NaN, so that reading it shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "permuted", "offset", "strided", "spread")
"""What `present` can do, besides "negated", which is drawn in a smaller share; `shared` below changes values first."""


def present(x: Tensor, layout: str, random: Random) -> Tensor:
    """The values of x in another layout."""
    if x.ndim < 2 and layout in ("transposed", "permuted"):
        layout = "offset"
    match layout:
        case "transposed":  # heads before time, as attention layers keep them; matrices by columns
            first, second = (1, 2) if x.ndim == 4 else (x.ndim - 2, x.ndim - 1)
            return x.transpose(first, second).contiguous().transpose(first, second)
        case "permuted":  # such as the features first, as channels-last images have them
            order = random.sample(range(x.ndim), x.ndim)
            back = [order.index(axis) for axis in range(x.ndim)]
            return x.permute(order).contiguous().permute(back)
        case "offset":  # inside a larger storage, not aligned to a vector register
            start = random.randrange(1, 9)
            storage = x.new_full((x.numel() + start + 5,), math.nan)
            view = storage[start : start + x.numel()].view(x.shape)
        case "strided":  # every second feature of a projection
            storage = x.new_full((*x.shape[:-1], 2 * x.shape[-1]) if x.ndim else (2,), math.nan)
            view = storage[..., ::2] if x.ndim else storage[0]
        case "spread":  # a slice of a wider tensor in every axis
            storage = x.new_full([size + 2 for size in x.shape], math.nan)
            view = storage[tuple(slice(1, 1 + size) for size in x.shape)]
        case "negated":  # carries torch's negation bit: memory holds −x
            return torch._neg_view(x.neg())  # pyright: ignore[reportPrivateImportUsage]
        case _:
            return x.contiguous()
    return view.copy_(x)


def shared(x: Tensor, axis: int) -> Tensor:
    """The first entry along an axis for all of it, with stride 0."""
    return x.narrow(axis, 0, 1).expand_as(x)
