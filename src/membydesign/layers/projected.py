"""Parts that several architectures share: maps to q, k and v, gates of delta rules, steps and starting values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.layers.base import positive
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import inverse_softplus, start_at, wide

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.design import Design
    from membydesign.filter.api import Backend, Method

NOISELESS = {"prior_variance": 1.0, "write_noise": 0.0}
"""The additive write with trust ω = 1."""


class ProjectedLayer(FilterLayer):
    r"""A layer with a linear map each for q, k and v, short convolutions behind them, and a map back to the width.

    A class that calls `add_read_out` reads out $W_o\bigl(\mathrm{RMSNorm}(y) \odot \mathrm{SiLU}(W_g x)\bigr)$; others
    override `read_out`.

    Args:
        mapped_key_dim: entries of each q and k as they are mapped from x; default key_dim.

    `FilterLayer` documents the other arguments.
    """

    g_proj: nn.Linear | None
    o_norm: nn.RMSNorm

    def __init__(
        self,
        design: Design,
        hidden_size: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        short_convolution: int | None,
        num_key_heads: int | None = None,
        mapped_key_dim: int | None = None,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(design, hidden_size, num_heads, key_dim, value_dim, method=method, backend=backend)
        self.num_key_heads = divisor_of_heads(num_heads if num_key_heads is None else num_key_heads, num_heads)
        keys = self.num_key_heads * (key_dim if mapped_key_dim is None else mapped_key_dim)
        values = num_heads * value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            None if short_convolution is None else ShortConvolution(n, short_convolution) for n in (keys, keys, values)
        )
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def add_read_out(self, output_gate: bool, norm_eps: float) -> None:
        """Add the gate W_g, if there is one, and the norm of each head."""
        values = self.num_heads * self.value_dim
        self.g_proj = nn.Linear(self.hidden_size, values, bias=False) if output_gate else None
        self.o_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it if the layer has a gate, and project back to the width."""
        del inputs
        normed = rms_normed(y, self.o_norm).flatten(-2)
        return self.o_proj((normed if self.g_proj is None else normed * F.silu(wide(self.g_proj(x)))).to(x.dtype))

    def projected(
        self,
        x: Tensor,
        tails: tuple[Tensor, ...] | None,
        cu_seqlens: Tensor | None,
        *,
        bare: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Map x, [B,T,hidden_size], to q and k, [B,T,num_key_heads,·], v, [B,T,H,M], and the tails to keep.

        `bare` replaces the SiLU of the convolutions in a layer without convolutions.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        new_tails: tuple[Tensor, ...] = ()
        if self.q_conv1d is not None and self.k_conv1d is not None and self.v_conv1d is not None:
            q_tail, k_tail, v_tail = (None, None, None) if tails is None else tails
            q, q_tail = self.q_conv1d(q, q_tail, cu_seqlens)
            k, k_tail = self.k_conv1d(k, k_tail, cu_seqlens)
            v, v_tail = self.v_conv1d(v, v_tail, cu_seqlens)
            new_tails = (q_tail, k_tail, v_tail)
        elif bare is not None:
            q, k, v = bare(q), bare(k), bare(v)
        q, k = (y.unflatten(-1, (self.num_key_heads, -1)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.num_heads, self.value_dim)), new_tails


def convolved(
    convolution: ShortConvolution | None, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Apply a layer's only convolution, or SiLU alone if it has none; return the result and the tails to keep."""
    if convolution is None:
        return F.silu(x), ()
    y, tail = convolution(x, None if tails is None else tails[0], cu_seqlens)
    return y, (tail,)


def divisor_of_heads(num_key_heads: int, num_heads: int) -> int:
    """Return num_key_heads; refuse a number that does not divide num_heads."""
    if positive("num_heads", num_heads) % positive("num_key_heads", num_key_heads):
        raise ValueError(f"num_key_heads: expected a divisor of num_heads = {num_heads}, got {num_key_heads}")
    return num_key_heads


def expanded_value_dim(hidden_size: int, num_heads: int, value_dim: int | None) -> int:
    """Return M of a layer whose heads share an inner width, by default twice the hidden size."""
    if value_dim is not None:
        return value_dim
    if 2 * positive("hidden_size", hidden_size) % positive("num_heads", num_heads):
        raise ValueError(
            f"num_heads: expected a divisor of 2·hidden_size = {2 * hidden_size} (or a value_dim), got {num_heads}"
        )
    return 2 * hidden_size // num_heads


def for_every_head(x: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or queries, [B,T,num_key_heads,D], for the heads that share them: [B,T,H,D]."""
    shared = num_heads // x.shape[-2]
    return x if shared == 1 else x.repeat_interleave(shared, -2)


def delta_noises(logits: Tensor, k: Tensor) -> dict[str, Tensor | float]:
    r"""Express a delta rule's gate as noises: $\lambda = 1$, $r^2 = 1/\beta - \lVert k\rVert^2$.

    Args:
        logits: of the gate, $\beta = \sigma(\text{logits})$, [B,T,H].
        k: keys of length one, [B,T,H,D].

    A gate of 1 would need a noise of 0, which the design does not allow. So $r^2$ is at least the machine epsilon of
    its type.
    """
    # 1/β = 1 + e^{-logits}, where only the second term is small; below -64 the gate is zero, and would overflow.
    noise = wide(logits).clamp(min=-64).neg().exp() + (1 - wide(k).square().sum(-1))
    return {"prior_variance": 1.0, "write_noise": noise.clamp(min=torch.finfo(noise.dtype).eps)}


def rms_normed(y: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Apply an RMSNorm to y in float32 at least, whatever the type of its weight."""
    return F.rms_norm(wide(y), norm.normalized_shape, wide(norm.weight), norm.eps)


def start_steps(bias: nn.Parameter) -> None:
    """Start softplus(bias) between 0.001 and 0.1, log-uniformly."""
    logs = torch.empty(bias.shape, device=bias.device).uniform_(math.log(1e-3), math.log(1e-1))
    start_at(bias, inverse_softplus(logs.exp()))


def start_rates(A_log: nn.Parameter, low: float, high: float) -> None:
    """Start the rates exp(A_log) uniformly between low and high."""
    start_at(A_log, torch.empty(A_log.shape, device=A_log.device).uniform_(low, high).log())
