"""Preconditioned Gated DeltaNet in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import PreconditionedDelta
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import ProjectedLayer, start_rates, start_steps

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class PreconditionedDeltaNet(ProjectedLayer):
    r"""Preconditioned Gated DeltaNet: a delta rule whose step knows how much was written where (Tumma et al., 2026).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde q = \mathrm{unit}(q)/\sqrt{D}, \qquad
    \tilde k = \mathrm{unit}(k)$$
    $$\log a_t = -e^{A}\,\mathrm{softplus}(W_a x_t + b), \quad \beta_t = \sigma(W_b x_t), \qquad
    \log\gamma_t = -e^{A'}\,\mathrm{softplus}(W_a' x_t + b'), \quad \eta_t = \sigma(W_b' x_t)$$
    $$c_t = \gamma_t c_{t-1} + \eta_t \tilde k_t \odot \tilde k_t, \qquad s_t = x^{-r_t/(1+|r_t|)}, \quad
    r_t = \log(c_t + \epsilon) - \varsigma$$
    $$M_t = a_t M_{t-1} + \beta_t (s_t \odot \tilde k_t) (v_t - a_t M_{t-1}^\top \tilde k_t)^\top, \qquad
    y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t) \odot \mathrm{SiLU}(W_g x_t)\bigr)$$

    Parameters have the names and shapes that flash-linear-attention gives them; what belongs to the preconditioner is
    called `atk` there.

    Args:
        value_dim: default 2·head_dim.
        short_convolution: default 4; None for SiLU alone.
        scale_range: x, how far a step may be scaled; 1 is Gated DeltaNet.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 0 and 16, steps softplus(b) log-uniformly between 0.001 and 0.1, centers ς at
    −0.2.

    Examples:
        >>> PreconditionedDeltaNet(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=1024, covariance=32, convolution=384)
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
        scale_range: float = 1.5,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            PreconditionedDelta(range=scale_range),
            hidden_size,
            num_heads,
            head_dim,
            2 * head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.a_proj, self.b_proj, self.a_atk_proj, self.b_atk_proj = (
            nn.Linear(hidden_size, num_heads, bias=False) for _ in range(4)
        )
        self.A_log, self.dt_bias, self.A_log_atk, self.dt_bias_atk, self.log_atk_scale = (
            nn.Parameter(torch.empty(num_heads)) for _ in range(5)
        )
        self.add_read_out(output_gate, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps, centers and convolutions."""
        super().reset_parameters()
        for rates, steps in ((self.A_log, self.dt_bias), (self.A_log_atk, self.dt_bias_atk)):
            start_rates(rates, 1e-2, 16)  # log 0 is not a number to learn from
            start_steps(steps)
        nn.init.constant_(self.log_atk_scale, -0.2)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and scaled unit queries, values, decays and gates of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        parameters: dict[str, Tensor | float] = {
            "log_decay": -wide(self.A_log).exp() * F.softplus(wide(self.a_proj(x)) + wide(self.dt_bias)),
            "gate": wide(self.b_proj(x)).sigmoid(),
            "curvature_log_decay": -wide(self.A_log_atk).exp()
            * F.softplus(wide(self.a_atk_proj(x)) + wide(self.dt_bias_atk)),
            "curvature_gate": wide(self.b_atk_proj(x)).sigmoid(),
            "log_center": wide(self.log_atk_scale).expand(*x.shape[:2], -1),
        }
        return StepInputs(unit(q) * self.key_dim**-0.5, unit(k), v, parameters), new
