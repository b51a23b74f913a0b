r"""The short causal convolution of Transformers' recurrent layers, and SiLU after it: y_t = SiLU(b + Σ_j w_j x_{t−j}).

Channels are the second axis in Transformers, [B,n,T], but what is convolved is a transposed projection, [B,T,n]. Sums
of shifted products along that layout are faster on a CPU than a grouped `conv1d`, above all backwards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from membydesign.integrations.transformers.packing import boundaries, pieces
from membydesign.integrations.transformers.replaceable import Replacement

BLOCK = 1 << 16
"""Entries of x that are convolved at once, so that they stay in cache between the taps."""


class _Convolution(torch.autograd.Function):
    """x [B,T,n], weight [n,W], bias [n] or None → y [B,T,n]; backward keeps x alone and sums again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        y, taps = torch.empty_like(x, memory_format=torch.contiguous_format), weight.mT.contiguous()
        for start, end in _blocks(x):
            part = _sums(y[:, start:end], x, taps, bias, start)
            if silu:
                F.silu(part, inplace=True)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, bias = ctx.saved_tensors
        T, taps = x.shape[1], weight.mT.contiguous()
        d = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.silu else dy
        dtaps = torch.zeros_like(taps)
        for start, end in _blocks(x):
            if ctx.silu:
                sums = _sums(torch.empty_like(d[:, start:end]), x, taps, bias, start)
                d[:, start:end] = torch.ops.aten.silu_backward(dy[:, start:end], sums)
            for lag, tap in _lags(len(taps), end):
                first = max(start, lag)
                dtaps[tap] += (d[:, first:end] * x[:, first - lag : end - lag]).sum((0, 1))
        dx = torch.empty_like(d)
        for start, end in _blocks(x):
            part = torch.mul(d[:, start:end], taps[-1], out=dx[:, start:end])
            for lag, tap in _lags(len(taps), T - start):
                if lag:
                    last = min(end + lag, T)
                    part[:, : last - lag - start].addcmul_(d[:, start + lag : last], taps[tap])
        return dx, dtaps.mT, None if bias is None else d.sum((0, 1)), None


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """Where blocks of tokens begin and end."""
    T, size = x.shape[1], max(16, BLOCK // (x.shape[0] * x.shape[2]))
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def _lags(width: int, tokens: int) -> list[tuple[int, int]]:
    """The distances to earlier tokens that a convolution reads among so many, each with its tap."""
    return [(lag, width - 1 - lag) for lag in range(min(width, tokens))]


def _sums(y: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None, start: int) -> Tensor:
    """Write the sums of the tokens from `start` into y, a block of them; taps are [W,n]."""
    end = start + y.shape[1]
    torch.mul(x[:, start:end], taps[-1], out=y)
    for lag, tap in _lags(len(taps), end):
        if lag:
            first = max(start, lag)
            y[:, first - start :].addcmul_(x[:, first - lag : end - lag], taps[tap])
    return y if bias is None else y.add_(bias)


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Convolve x, [B,n,T], with weights [n,W]. Packed sequences are kept apart."""
    if activation not in (None, "silu", "swish"):
        return NotImplemented
    bounds = boundaries(hidden_states.shape[-1], options)
    dtype, silu = torch.promote_types(weight.dtype, torch.float32), activation is not None  # as conv1d sums inside
    x, weight, bias = hidden_states.mT.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    parts = [x] if bounds is None else [part for (part,) in pieces(bounds, (x,))]
    y: list[Tensor] = [_Convolution.apply(part, weight, bias, silu) for part in parts]
    return (y[0] if len(y) == 1 else torch.cat(y, 1)).mT.to(hidden_states.dtype)


def update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve one token, [B,n,1], after the last inputs, [B,n,at least W−1], and shift them in place."""
    tensors = (hidden_states, conv_state, weight, bias)
    followed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    width, kept = weight.shape[1], conv_state.shape[2]
    if followed or activation not in (None, "silu", "swish") or hidden_states.shape[2] != 1 or kept < width - 1:
        return NotImplemented
    x = torch.cat((conv_state, hidden_states), -1)
    conv_state.copy_(x[..., 1:])
    y = torch.linalg.vecdot(x[..., -width:].float(), weight.float())
    if bias is not None:
        y = y + bias.float()
    return (y if activation is None else F.silu(y)).unsqueeze(-1).to(hidden_states.dtype)


REPLACEMENTS = {
    "causal_conv1d_update": Replacement(("hidden_states", "conv_state", "weight", "bias", "activation"), update),
    "causal_conv1d_fn": Replacement(("hidden_states", "weight", "bias", "activation"), convolve),
}
"""By the names of Transformers' functions."""
