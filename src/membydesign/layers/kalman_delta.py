"""Kalman Delta Networks in full."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import ProjectedLayer, rms_normed, start_rates, start_steps

if TYPE_CHECKING:
    from membydesign.design import Design
    from membydesign.filter.api import Backend, Method

LEAST_NOISE = 0.01
"""The smallest write noise."""
LEAST_PRECISION = 0.1
"""The smallest precision before anything is written."""


class _KalmanDelta(ProjectedLayer):
    """What both networks share: all but the process noise."""

    def __init__(
        self,
        design: Design,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None,
        short_convolution: int | None,
        norm_eps: float,
        method: Method,
        backend: Backend,
    ) -> None:
        super().__init__(
            design,
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        rank = self.value_dim
        self.f_a_proj = nn.Linear(hidden_size, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, num_heads * head_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * head_dim))
        self.r_proj = nn.Linear(hidden_size, num_heads)
        self.initial_precision_param = nn.Parameter(torch.empty(num_heads))
        self.g_a_proj = nn.Linear(hidden_size, rank, bias=False)
        self.g_b_proj = nn.Linear(rank, num_heads * self.value_dim)
        self.o_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps, the first precision and convolutions."""
        super().reset_parameters()
        start_rates(self.A_log, 1, 16)
        start_steps(self.dt_bias)
        nn.init.constant_(self.initial_precision_param, math.log(math.expm1(1 - LEAST_PRECISION)))

    @abstractmethod
    def process_noise(self, x: Tensor) -> Tensor:
        """ω of x before scaling, [B,T,H] or [B,T,H,D]."""

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and scaled unit queries, values, decays and noises of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        step = F.softplus(wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias))
        # Gains depend on ratios of variances. So a first precision c₀ is a first variance of 1 with noises c₀ as large.
        precision = LEAST_PRECISION + F.softplus(wide(self.initial_precision_param))
        process_noise = self.process_noise(x)
        parameters = {
            "log_decay": -wide(self.A_log).exp()[:, None] * step.unflatten(-1, (self.num_heads, self.key_dim)),
            "process_noise": process_noise * (precision if process_noise.ndim == 3 else precision[:, None]),
            "write_noise": (LEAST_NOISE + F.softplus(wide(self.r_proj(x)))) * precision,
        }
        return StepInputs(unit(q) * self.key_dim**-0.5, unit(k), v, parameters), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it, and project back to the width."""
        del inputs
        gate = wide(self.g_b_proj(self.g_a_proj(x))).sigmoid()
        return self.o_proj((rms_normed(y, self.o_norm).flatten(-2) * gate).to(x.dtype))


@final
class IsotropicKalmanDelta(_KalmanDelta):
    r"""The isotropic Kalman Delta Network: KDA with a gate that knows how much was written (Bui, Huang & Ying, 2026).

    $$q, k, v, \tilde q, \tilde k, \alpha \text{ as in KDA}, \qquad
    \omega_t = \mathrm{softplus}(W_\omega x_t + b_\omega), \qquad r_t = 0.01 + \mathrm{softplus}(W_r x_t + b_r)$$
    $$z_t = \tfrac1D \textstyle\sum_i \alpha_{t,i}^2\, p_{t-1} + \omega_t, \qquad \beta_t = \frac{z_t}{r_t + z_t},
    \qquad \frac1{p_t} = \frac1{z_t} + \frac1{r_t}, \qquad \frac1{p_0} = 0.1 + \mathrm{softplus}(c)$$
    $$\bar M_t = \mathrm{diag}(\alpha_t) M_{t-1}, \qquad
    M_t = \bar M_t + \beta_t \tilde k_t (v_t - \bar M_t^\top \tilde k_t)^\top$$
    $$y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t) \odot \sigma(W_g^\uparrow W_g^\downarrow x_t + b_g)\bigr)$$

    The layer of the authors' code. Variances here are in units of $p_0$, which the layer learns: gains are the same.

    Args:
        short_convolution: default 4; None for SiLU alone.

    `FilterLayer` documents the arguments that all layers share. The low-rank maps pass through value_dim channels.

    Rates $e^A$ start uniformly between 1 and 16, steps log-uniformly between 0.001 and 0.1, $p_0$ at 1.

    Examples:
        >>> IsotropicKalmanDelta(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=512, covariance=2, convolution=288)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["kalman_delta_isotropic"],
            hidden_size,
            num_heads,
            head_dim,
            value_dim=value_dim,
            short_convolution=short_convolution,
            norm_eps=norm_eps,
            method=method,
            backend=backend,
        )
        self.omega_proj = nn.Linear(hidden_size, num_heads)
        self.reset_parameters()

    def process_noise(self, x: Tensor) -> Tensor:
        """One ω per head, [B,T,H]."""
        return F.softplus(wide(self.omega_proj(x)))


@final
class DiagonalKalmanDelta(_KalmanDelta):
    r"""The diagonal Kalman Delta Network: a precision for every row (Bui, Huang & Ying, 2026).

    $$q, k, v, \tilde q, \tilde k, \alpha \text{ as in KDA}, \qquad
    \omega_t = \mathrm{softplus}(W_\omega^\uparrow W_\omega^\downarrow x_t + b_\omega) \in \mathbb R^D,
    \qquad r_t = 0.01 + \mathrm{softplus}(W_r x_t + b_r)$$
    $$z_t = \alpha_t^2 \odot p_{t-1} + \omega_t, \qquad
    \kappa_t = \frac{z_t \odot \tilde k_t}{r_t + \sum_i z_{t,i} \tilde k_{t,i}^2}, \qquad
    \frac1{p_t} = \frac1{z_t} + \frac{D\, \tilde k_t^2}{r_t}, \qquad \frac1{p_0} = 0.1 + \mathrm{softplus}(c)$$
    $$\bar M_t = \mathrm{diag}(\alpha_t) M_{t-1}, \qquad
    M_t = \bar M_t + \kappa_t (v_t - \bar M_t^\top \tilde k_t)^\top$$

    with the output of `IsotropicKalmanDelta`. The layer of the authors' code. Variances here are in units of $p_0$,
    which the layer learns: gains are the same.

    Args:
        short_convolution: default 4; None for SiLU alone.

    `FilterLayer` documents the arguments that all layers share. The low-rank maps pass through value_dim channels.

    Rates $e^A$ start uniformly between 1 and 16, steps log-uniformly between 0.001 and 0.1, $p_0$ at 1, and ω at
    softplus(0) in all rows.

    Examples:
        >>> DiagonalKalmanDelta(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=512, covariance=32, convolution=288)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["kalman_delta_diagonal"],
            hidden_size,
            num_heads,
            head_dim,
            value_dim=value_dim,
            short_convolution=short_convolution,
            norm_eps=norm_eps,
            method=method,
            backend=backend,
        )
        self.omega_a_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.omega_weight = nn.Parameter(torch.empty(num_heads * head_dim, self.value_dim))
        self.omega_bias = nn.Parameter(torch.empty(num_heads * head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the process noise alike in all rows, and the rest as the shared parts do."""
        super().reset_parameters()
        nn.init.zeros_(self.omega_weight)
        nn.init.zeros_(self.omega_bias)

    def process_noise(self, x: Tensor) -> Tensor:
        """One ω per row, [B,T,H,D]."""
        logits = wide(F.linear(self.omega_a_proj(x), self.omega_weight)) + wide(self.omega_bias)
        return F.softplus(logits).unflatten(-1, (self.num_heads, self.key_dim))
