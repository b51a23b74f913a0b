"""Gated DeltaNet-2 in full."""

from __future__ import annotations

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
    from membydesign.filter.api import Backend, Method


@final
class GatedDeltaNet2(ProjectedLayer):
    r"""Gated DeltaNet-2: what is erased and what is written have gates of their own (Hatamizadeh et al., 2026).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde q = \mathrm{unit}(q)/\sqrt{D}, \qquad
    \tilde k = \mathrm{unit}(k)$$
    $$\log\alpha_t = -e^{A} \odot \mathrm{softplus}(W_f^\uparrow W_f^\downarrow x_t + b), \qquad
    b_t = \sigma(W_b x_t) \in \mathbb R^{H\times D}, \qquad w_t = \sigma(W_w x_t) \in \mathbb R^{H\times M}$$
    $$\bar M_t = \mathrm{diag}(\alpha_t) M_{t-1}, \qquad
    M_t = \bar M_t + \tilde k_t \bigl(w_t \odot v_t - \bar M_t^\top (b_t \odot \tilde k_t)\bigr)^\top$$
    $$y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t) \odot \sigma(W_g^\uparrow W_g^\downarrow x_t)\bigr)$$

    The low-rank maps pass through value_dim channels; A has one entry per head. Parameters have the shapes that
    flash-linear-attention gives them, and its names but for the low-rank maps: `f_proj.0`, `f_proj.1`, `g_proj.0` and
    `g_proj.1` are called `f_a_proj`, `f_b_proj`, `g_a_proj` and `g_b_proj`, as in KDA.

    Args:
        short_convolution: default 4; None for SiLU alone.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 1 and 16, steps softplus(b) log-uniformly between 0.001 and 0.1.

    Examples:
        >>> GatedDeltaNet2(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=512, covariance=0, convolution=288)
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
            catalogue["gated_deltanet_2"],
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        keys, values, rank = num_heads * head_dim, num_heads * self.value_dim, self.value_dim
        self.f_a_proj = nn.Linear(hidden_size, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, keys, bias=False)
        self.b_proj = nn.Linear(hidden_size, keys, bias=False)
        self.w_proj = nn.Linear(hidden_size, values, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.g_a_proj = nn.Linear(hidden_size, rank, bias=False)
        self.g_b_proj = nn.Linear(rank, values)
        self.o_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps and convolutions."""
        super().reset_parameters()
        start_rates(self.A_log, 1, 16)
        start_steps(self.dt_bias)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and scaled unit queries, values, decays and gates of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        step = F.softplus(wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias)).unflatten(
            -1, (self.num_heads, -1)
        )
        parameters: dict[str, Tensor | float] = {
            "log_decay": -wide(self.A_log).exp()[:, None] * step,
            "erase_gate": wide(self.b_proj(x)).sigmoid().unflatten(-1, (self.num_heads, -1)),
            "write_gate": wide(self.w_proj(x)).sigmoid().unflatten(-1, (self.num_heads, -1)),
        }
        return StepInputs(unit(q) * self.key_dim**-0.5, unit(k), v, parameters), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it, and project back to the width."""
        del inputs
        gate = wide(self.g_b_proj(self.g_a_proj(x))).sigmoid()
        return self.o_proj((rms_normed(y, self.o_norm).flatten(-2) * gate).to(x.dtype))
