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


class _Convolution(torch.autograd.Function):
    """x [B,T,n], weight [n,W], bias [n] or None → y [B,T,n]; backward keeps x alone and sums again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        y = _sums(x, weight, bias)
        return F.silu(y, inplace=True) if silu else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = grads
        x, weight, bias = ctx.saved_tensors
        if ctx.silu:
            d = torch.ops.aten.silu_backward(d, _sums(x, weight, bias))
        T, width = x.shape[1], weight.shape[1]
        dx = d * weight[:, -1]
        dw = torch.zeros_like(weight)
        for lag in range(min(width, T)):
            tap = width - 1 - lag
            later, earlier = d[:, lag:], x[:, : T - lag]
            if lag:
                dx[:, : T - lag].addcmul_(later, weight[:, tap])
            dw[:, tap] = (later * earlier).sum((0, 1))
        return dx, dw, None if bias is None else d.sum((0, 1)), None


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    T, width = x.shape[1], weight.shape[1]
    y = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for lag in range(1, min(width, T)):
        y[:, lag:].addcmul_(x[:, : T - lag], weight[:, width - 1 - lag])
    return y


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
