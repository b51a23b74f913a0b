"""Gated KalmaNet in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import KalmaNetMemory
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import ProjectedLayer, start_rates, start_steps

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method

LEAST_GATE = 1e-6
"""Added to the gate of a write, as the published layer does."""


@final
class GatedKalmaNet(ProjectedLayer):
    r"""Gated KalmaNet: a faded ridge regression, mixed with linear attention (Peng et al., 2025).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde q = \mathrm{unit}(q)/\sqrt D, \qquad
    \tilde k = \mathrm{unit}(k), \qquad \beta_t = \sigma(W_b x_t + b_b) + 10^{-6}$$
    $$\log\gamma_t = -e^{A}\, \mathrm{softplus}(W_a x_t + b), \qquad
    H_t = \gamma_t H_{t-1} + \beta_t^2 \tilde k_t \tilde k_t^\top, \qquad
    U_t = \gamma_t U_{t-1} + \beta_t^2 \tilde k_t v_t^\top$$
    $$x_t = (H_t + a \|H_t\|_F I)^{-1} \tilde q_t, \qquad
    y_t = W_o\bigl(\mathrm{RMSNorm}(U_t^\top (\tilde q_t + \alpha_t (x_t - \tilde q_t))) \odot
    \mathrm{SiLU}(W_g x_t)\bigr), \qquad \alpha_t = \sigma(W_\alpha x_t + b_\alpha)$$

    The layer of flash-linear-attention, with its parameter names, and its defaults: one decay for H and U. It solves
    with 30 steps of Chebyshev iteration, this one exactly, by Cholesky, token by token. In the terms of the design,
    $r_t^2 = 1/\beta_t^2$.

    Args:
        ridge_ratio: a.
        short_convolution: default 4; None for SiLU alone.
        norm_eps: default 1e-6.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 0.01 and 16, steps softplus(b) log-uniformly between 0.001 and 0.1.

    Examples:
        >>> GatedKalmaNet(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=512, covariance=512, convolution=288)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        ridge_ratio: float = 0.02,
        short_convolution: int | None = 4,
        output_gate: bool = True,
        norm_eps: float = 1e-6,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            KalmaNetMemory(ridge_ratio),
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.b_proj = nn.Linear(hidden_size, num_heads)
        self.alpha_proj = nn.Linear(hidden_size, num_heads)
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
        """Compute unit keys and scaled unit queries, values, decays, noises and mixing of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        step = F.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))
        parameters = {
            "log_decay": -wide(self.A_log).exp() * step,
            "write_noise": (wide(self.b_proj(x)).sigmoid() + LEAST_GATE).square().reciprocal(),
            "mixing": wide(self.alpha_proj(x)).sigmoid(),
        }
        return StepInputs(unit(q) * self.key_dim**-0.5, unit(k), v, parameters), new
