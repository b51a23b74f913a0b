"""MesaNet in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import inverse_softplus, start_at, wide
from membydesign.layers.projected import ProjectedLayer

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method

LEAST_RIDGE = 0.25
"""The smallest entry of Λ."""


@final
class MesaNet(ProjectedLayer):
    r"""MesaNet: a regression of all values on their keys, solved at every token (von Oswald et al., 2025).

    $$q, k = \mathrm{unit}(\mathrm{SiLU}(\mathrm{conv}(W_{q,k} x))), \qquad v = W_v x, \qquad
    \gamma_t = \sigma(W_a x_t + b_a), \qquad \beta_t = \sigma(W_b x_t + b_b)$$
    $$H_t = \gamma_t H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = \gamma_t U_{t-1} + \beta_t k_t v_t^\top$$
    $$y_t = W_o\, \mathrm{RMSNorm}\bigl(U_t^\top (H_t + \Lambda)^{-1} q_t\bigr), \qquad
    \Lambda = \tfrac14 + \mathrm{softplus}(\texttt{lambda\_params})$$

    The layer of flash-linear-attention, with its parameter names; it solves with 30 steps of conjugate gradients, this
    one exactly, by Cholesky, token by token. In the terms of the design, $r_t^2 = 1/\beta_t$ and
    $\lambda = 1/\Lambda$ for each row.

    Args:
        short_convolution: of q and k, default 4; None for SiLU alone. Values have none.

    `FilterLayer` documents the arguments that all layers share.

    Λ starts at 1.

    Examples:
        >>> MesaNet(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=512, covariance=512, convolution=192)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        output_gate: bool = False,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["mesa_net"],
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.v_conv1d = None
        self.a_proj = nn.Linear(hidden_size, num_heads)
        self.b_proj = nn.Linear(hidden_size, num_heads)
        self.lambda_params = nn.Parameter(torch.empty(num_heads * head_dim))
        self.add_read_out(output_gate, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start Λ at 1."""
        super().reset_parameters()
        start_at(self.lambda_params, inverse_softplus(torch.full_like(self.lambda_params, 1 - LEAST_RIDGE)))

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and queries, values, decays, noises and the prior of x."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        new: tuple[Tensor, ...] = ()
        if self.q_conv1d is None or self.k_conv1d is None:
            q, k = F.silu(q), F.silu(k)
        else:
            q_tail, k_tail = (None, None) if tails is None else tails
            q, q_tail = self.q_conv1d(q, q_tail, cu_seqlens)
            k, k_tail = self.k_conv1d(k, k_tail, cu_seqlens)
            new = (q_tail, k_tail)
        q, k, v = (y.to(q.dtype).unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))  # autocast leaves v apart
        ridge = LEAST_RIDGE + F.softplus(wide(self.lambda_params)).view(self.num_heads, self.key_dim)
        parameters = {
            "log_decay": F.logsigmoid(wide(self.a_proj(x))),
            "write_noise": 1 + wide(self.b_proj(x)).clamp(min=-64).neg().exp(),  # 1/σ
            "prior_variance": (1 / ridge).expand(*x.shape[:2], self.num_heads, self.key_dim),
        }
        return StepInputs(unit(q), unit(k), v, parameters), new
