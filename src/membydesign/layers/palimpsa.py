"""Palimpsa in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import positive, unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import ProjectedLayer, start_rates, start_steps

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class PalimpsaLayer(ProjectedLayer):
    r"""Palimpsa: gated linear attention whose entries become less plastic as they are written (Bonnet et al., 2026).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde q = \mathrm{unit}(q)/\sqrt D, \qquad
    \tilde k = \mathrm{unit}(k), \qquad \beta_t = \sigma(W_s x_t)$$
    $$\gamma_t = \exp(-e^{A}\, \mathrm{softplus}(W_{dt} x_t + b)), \qquad
    b_t = \beta_t\, \mathrm{softplus}(\texttt{b\_scale})\, \sigma(W_b^\uparrow W_b^\downarrow x_t) \in \mathbb R^M$$
    $$I_t = \gamma_t I_{t-1} + (1 - \gamma_t) + \tilde k_t^2 b_t^\top, \qquad
    \eta_t = \gamma_t \eta_{t-1} + \beta_t \tilde k_t v_t^\top, \qquad M_t = \eta_t / I_t$$
    $$y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t + D \odot v_t) \odot \mathrm{SiLU}(W_g x_t)\bigr)$$

    The layer of the authors' code, with its parameter names. The prior importance is 1, as it is there, where it is not
    trained. In the terms of the design, $r_j^2 = 1/b_j$, and the observed value is $\beta v / b$.

    Args:
        value_dim: default 2·head_dim.
        importance_rank: channels through which b is mapped.
        short_convolution: default 4; None for SiLU alone.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 0.01 and 16, steps softplus(b) log-uniformly between 0.001 and 0.1, `b_scale`
    and the skip D at 1.

    Examples:
        >>> PalimpsaLayer(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=1024, covariance=1024, convolution=384)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        importance_rank: int = 128,
        short_convolution: int | None = 4,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["palimpsa"],
            hidden_size,
            num_heads,
            head_dim,
            2 * positive("head_dim", head_dim) if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.b_rank_proj = nn.Linear(hidden_size, positive("importance_rank", importance_rank), bias=False)
        self.b_proj = nn.Linear(importance_rank, num_heads * self.value_dim, bias=False)
        self.b_scale = nn.Parameter(torch.empty(num_heads))
        self.bs_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.add_read_out(output_gate, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps, scales, skips and convolutions."""
        super().reset_parameters()
        start_rates(self.A_log, 1e-2, 16)  # log 0 is not a number to learn from
        start_steps(self.dt_bias)
        nn.init.ones_(self.b_scale)
        nn.init.ones_(self.D)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and scaled unit queries, observed values, decays and noises of x; keep v for the skip."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        step = F.softplus(wide(self.dt_proj(x)) + wide(self.dt_bias))
        share = wide(self.b_proj(self.b_rank_proj(x))).clamp(-16, 16).sigmoid()  # beyond 16 it is 0 or 1
        plasticity = share.unflatten(-1, (self.num_heads, -1)) * F.softplus(wide(self.b_scale))[:, None]
        gate = wide(self.bs_proj(x)).clamp(min=-64).sigmoid()[..., None]
        parameters = {
            "log_decay": -wide(self.A_log).exp() * step,
            "prior_precision": 1.0,
            "write_noise": (gate * plasticity).reciprocal(),
        }
        observed = wide(v) / plasticity
        return StepInputs(unit(q) * self.key_dim**-0.5, unit(k), observed.to(v.dtype), parameters, aside=(v,)), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Add the skip, normalise each head, gate it, and project back to the width."""
        (v,) = inputs.aside
        return super().read_out(wide(y) + wide(self.D)[:, None] * v, x, inputs)
