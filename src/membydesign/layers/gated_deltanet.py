"""Gated DeltaNet in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import (
    ProjectedLayer,
    delta_noises,
    for_every_head,
    start_rates,
    start_steps,
)

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class GatedDeltaNet(ProjectedLayer):
    r"""Gated DeltaNet: a delta rule on a memory that fades (Yang, Kautz & Hatamizadeh, ICLR 2025).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde q = \mathrm{unit}(q)/\sqrt{D}, \qquad
    \tilde k = \mathrm{unit}(k)$$
    $$\log\alpha_t = -e^{A}\,\mathrm{softplus}(W_a x_t + b), \qquad \beta_t = \sigma(W_b x_t)$$
    $$M_t = \alpha_t M_{t-1} + \beta_t \tilde k_t (v_t - \alpha_t M_{t-1}^\top \tilde k_t)^\top, \qquad
    y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t) \odot \mathrm{SiLU}(W_g x_t)\bigr)$$

    In the terms of the design, $\lambda_t = 1$ and $r_t^2 = 1/\beta_t - \lVert\tilde k_t\rVert^2$. Parameters have the
    names and shapes that flash-linear-attention gives them, so that its checkpoints load.

    Args:
        value_dim: default 2·head_dim.
        short_convolution: default 4; None for SiLU alone.
        num_key_heads: fewer than num_heads in Qwen3-Next.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 0 and 16, steps softplus(b) log-uniformly between 0.001 and 0.1.

    Examples:
        >>> layer = GatedDeltaNet(hidden_size=128, num_heads=4, head_dim=32, value_dim=64)
        >>> layer.state_size()
        LayerStateSize(mean=8192, covariance=0, convolution=1536)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        output_gate: bool = True,
        num_key_heads: int | None = None,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["gated_deltanet"],
            hidden_size,
            num_heads,
            head_dim,
            2 * head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            num_key_heads=num_key_heads,
            method=method,
            backend=backend,
        )
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.add_read_out(output_gate, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps and convolutions."""
        super().reset_parameters()
        start_rates(self.A_log, 1e-2, 16)  # log 0 is not a number to learn from
        start_steps(self.dt_bias)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and scaled unit queries, values, decays and noises of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        q, k = (for_every_head(unit(y), self.num_heads) for y in (q, k))
        step = F.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))
        decay = {"log_decay": -wide(self.A_log).exp() * step}
        return StepInputs(q * self.key_dim**-0.5, k, v, {**decay, **delta_noises(self.b_proj(x), k)}), new
