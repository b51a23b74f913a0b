"""What several architectures share: maps to q, k and v, gates of delta rules, steps and their starting values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.layers.base import positive
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterLayer
from membydesign.layers.parameters import inverse_softplus, start_at, wide

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.design import DesignModel
    from membydesign.ops.filtering import Backend, Method

NOISELESS = {"prior_variance": 1.0, "write_noise": 0.0}
"""The additive write with trust ω = 1."""


class ProjectedLayer(FilterLayer):
    """A layer with a linear map each for q, k and v, short convolutions behind them, and a map back to the width.

    Args:
        design: what the memory assumes.
        hidden_size: the width of x and y.
        num_heads: H.
        key_dim: D.
        value_dim: M.
        short_convolution: width of the convolutions on q, k and v; None for none.
        num_key_heads: heads of q and k, each for num_heads/num_key_heads heads of values; default num_heads.
        mapped_key_dim: entries of each q and k as they are mapped from x; default key_dim.
        method: "chunk" or "recurrent", as `filter_sequence` takes it.
        backend: likewise; "torch" can be differentiated more than once.
    """

    def __init__(
        self,
        design: DesignModel,
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

    @property
    def convolutions(self) -> list[ShortConvolution]:
        """Those of q, k and v, or none."""
        return [c for c in (self.q_conv1d, self.k_conv1d, self.v_conv1d) if c is not None]

    @property
    def tail_size(self) -> int:
        """Elements of the tails of its convolutions."""
        return sum(convolution.state_size for convolution in self.convolutions)

    def reset_parameters(self) -> None:
        """The starting values of the convolutions."""
        for convolution in self.convolutions:
            convolution.reset_parameters()

    def projected(
        self,
        x: Tensor,
        tails: tuple[Tensor, ...] | None,
        cu_seqlens: Tensor | None,
        *,
        bare: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """From x, [B,T,hidden_size], to q and k, [B,T,num_key_heads,·], v, [B,T,H,M], and the tails to keep.

        `bare` is applied to q, k and v where there are no convolutions, whose SiLU is then missing.
        """
        found = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        new: list[Tensor] = []
        for i, convolution in enumerate(self.convolutions):
            found[i], tail = convolution(found[i], None if tails is None else tails[i], cu_seqlens)
            new.append(tail)
        if not new and bare is not None:
            found = [bare(y) for y in found]
        q, k = (y.unflatten(-1, (self.num_key_heads, -1)) for y in found[:2])
        return q, k, found[2].unflatten(-1, (self.num_heads, self.value_dim)), tuple(new)


def convolved(
    convolution: ShortConvolution | None, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The one convolution of a layer, or the SiLU that is left without it, and the tails to keep."""
    if convolution is None:
        return F.silu(x), ()
    y, tail = convolution(x, None if tails is None else tails[0], cu_seqlens)
    return y, (tail,)


def divisor_of_heads(num_key_heads: int, num_heads: int) -> int:
    """How many heads of keys there are; refuses a number that does not divide the heads."""
    if positive("num_heads", num_heads) % positive("num_key_heads", num_key_heads):
        raise ValueError(f"num_key_heads: expected a divisor of num_heads = {num_heads}, got {num_key_heads}")
    return num_key_heads


def expanded_value_dim(hidden_size: int, num_heads: int, value_dim: int | None) -> int:
    """M, where heads share an inner width among them: twice the hidden size, if nobody says."""
    if value_dim is not None:
        return value_dim
    if 2 * positive("hidden_size", hidden_size) % positive("num_heads", num_heads):
        raise ValueError(
            f"num_heads: expected a divisor of 2·hidden_size = {2 * hidden_size} (or a value_dim), got {num_heads}"
        )
    return 2 * hidden_size // num_heads


def for_every_head(x: Tensor, num_heads: int) -> Tensor:
    """Keys or queries, [B,T,num_key_heads,D], repeated for the heads that share them, [B,T,H,D]."""
    shared = num_heads // x.shape[-2]
    return x if shared == 1 else x.repeat_interleave(shared, -2)


def delta_noises(logits: Tensor, k: Tensor) -> dict[str, Tensor | float]:
    r"""A delta rule's gate as noises: $\lambda = 1$, $r^2 = 1/\beta - \lVert k\rVert^2$.

    Args:
        logits: of the gate, $\beta = \sigma(\text{logits})$, [B,T,H].
        k: keys of length one, [B,T,H,D].

    A gate of 1 has no noise at all, which no observation has; $r^2$ stays above the smallest step of its type, and the
    gate within that step of 1.
    """
    # 1/β = 1 + e^{-logits}, where only the second term is small; below -64 the gate is zero, and would overflow.
    noise = wide(logits).clamp(min=-64).neg().exp() + (1 - wide(k).square().sum(-1))
    return {"prior_variance": 1.0, "write_noise": noise.clamp(min=torch.finfo(noise.dtype).eps)}


def rms_normed(y: Tensor, norm: nn.RMSNorm) -> Tensor:
    """The norm's RMSNorm of y in float32 at least, whatever the type of its weight."""
    return F.rms_norm(wide(y), norm.normalized_shape, wide(norm.weight), norm.eps)


def swish_gated(y: Tensor, norm: nn.RMSNorm, gate: nn.Linear | None, x: Tensor) -> Tensor:
    """RMSNorm(y) ⊙ SiLU(W_g x) with every head normalised by itself: from [B,T,H,M] to [B,T,H·M], in the type of x."""
    normed = rms_normed(y, norm).flatten(-2)
    return (normed if gate is None else normed * F.silu(wide(gate(x)))).to(x.dtype)


def start_steps(bias: nn.Parameter) -> None:
    """Let softplus(bias) begin between 0.001 and 0.1, log-uniformly."""
    logs = torch.empty(bias.shape, device=bias.device).uniform_(math.log(1e-3), math.log(1e-1))
    start_at(bias, inverse_softplus(logs.exp()))


def start_rates(A_log: nn.Parameter, low: float, high: float) -> None:
    """Let the rates exp(A_log) begin uniformly between low and high."""
    start_at(A_log, torch.empty(A_log.shape, device=A_log.device).uniform_(low, high).log())
