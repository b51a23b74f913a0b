"""Mamba-2's mixer in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import start_at, wide
from membydesign.layers.projected import (
    NOISELESS,
    convolved,
    divisor_of_heads,
    expanded_value_dim,
    for_every_head,
    rms_normed,
    start_steps,
)

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class Mamba2(FilterLayer):
    r"""Mamba-2: a selective state space model with one decay per head (Dao & Gu, ICML 2024).

    $$(z, u, \Delta) = W_\mathrm{in}\, x, \qquad (x', B, C) = \mathrm{SiLU}(\mathrm{conv}(u) + b_\mathrm{conv}), \qquad
    \Delta_t \leftarrow \mathrm{softplus}(\Delta_t + b)$$
    $$M_t = e^{-\Delta_t e^{A}} M_{t-1} + B_t (\Delta_t x'_t)^\top, \qquad
    y_t = W_\mathrm{out}\,\mathrm{RMSNorm}\bigl((M_t^\top C_t + D x'_t) \odot \mathrm{SiLU}(z_t)\bigr)$$

    Dao & Gu, Transformers are SSMs. The write key is $B_t$, the query $C_t$, the value $\Delta_t x'_t$, and the design
    is the noiseless additive write, $\lambda_t = 1$ and $r_t^2 = 0$. The norm is over all heads together. Parameters
    have the names and shapes of `transformers.models.mamba2`.

    Args:
        head_dim: D, rows of each head's memory, which Mamba-2 calls its state size.
        value_dim: M, columns of each head's memory, which Mamba-2 calls its head size; the inner width is
            num_heads·value_dim. Default 2·hidden_size/num_heads.
        short_convolution: width of the convolution on x', B and C, default 4; 1 only scales; None for SiLU alone.
        num_key_heads: heads of B and C, which Mamba-2 calls groups; default 1.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start at 1, …, H, steps softplus(b) log-uniformly between 0.001 and 0.1, and the skip D at 1.

    Examples:
        >>> Mamba2(hidden_size=128, num_heads=8, head_dim=32).state_size()
        LayerStateSize(mean=8192, covariance=0, convolution=960)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        num_key_heads: int = 1,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        value_dim = expanded_value_dim(hidden_size, num_heads, value_dim)
        super().__init__(
            catalogue["mamba2"], hidden_size, num_heads, head_dim, value_dim, method=method, backend=backend
        )
        self.num_key_heads = divisor_of_heads(num_key_heads, num_heads)
        self.inner_size = num_heads * value_dim
        mixed = self.inner_size + 2 * num_key_heads * head_dim
        self.in_proj = nn.Linear(hidden_size, self.inner_size + mixed + num_heads, bias=False)
        self.conv1d = None if short_convolution is None else ShortConvolution(mixed, short_convolution, bias=True)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.norm = nn.RMSNorm(self.inner_size, eps=norm_eps)
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps, skip and convolution."""
        super().reset_parameters()
        start_at(self.A_log, torch.arange(1.0, self.num_heads + 1, device=self.A_log.device).log())
        start_steps(self.dt_bias)
        nn.init.ones_(self.D)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute C, B, Δx' and decays of x; keep x' and z for the read-out."""
        H, keys = self.num_heads, self.num_key_heads * self.key_dim
        z, mixed, step = self.in_proj(x).split([self.inner_size, self.inner_size + 2 * keys, H], -1)
        mixed, new = convolved(self.conv1d, mixed, tails, cu_seqlens)
        inner, B, C = mixed.split([self.inner_size, keys, keys], -1)
        inner = inner.unflatten(-1, (H, self.value_dim))
        k, q = (for_every_head(y.unflatten(-1, (self.num_key_heads, self.key_dim)), H) for y in (B, C))
        step = F.softplus(wide(step) + wide(self.dt_bias))
        v = (step[..., None] * inner).to(inner.dtype)
        log_decay = -wide(self.A_log).exp() * step
        return StepInputs(q, k, v, {"log_decay": log_decay, **NOISELESS}, aside=(inner, z)), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Add the skip, gate, normalise, and project back to the width."""
        inner, z = inputs.aside
        y = (wide(y) + wide(self.D)[:, None] * inner).flatten(-2) * F.silu(wide(z))
        return self.out_proj(rms_normed(y, self.norm).to(x.dtype))
