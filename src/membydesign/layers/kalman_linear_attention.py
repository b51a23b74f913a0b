"""Kalman Linear Attention in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import unit
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import convolved, expanded_value_dim, start_steps

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method

LEAST_WRITE_NOISE = 1e-4
LEAST_PROCESS_NOISE = 1e-7
"""The smallest variances, as in the published layer."""


@final
class KLA(FilterLayer):
    r"""Kalman Linear Attention: D·M scalar Kalman filters in a gated block (Shaj et al., 2026).

    $$z, g = W_{\mathrm{in}} x, \qquad z' = \mathrm{SiLU}(\mathrm{conv}(z)), \qquad
    v, s, k, q = W_{\mathrm{sensor}} z', \qquad r^2 = \mathrm{softplus}(s) + 10^{-4}$$
    $$a = e^{-\Delta e^\ell}, \qquad p = \frac{p_c}{2 e^\ell}(1 - e^{-2 \Delta e^\ell}), \qquad
    \Delta = \mathrm{softplus}(\delta) + 10^{-7}$$
    $$\bar\lambda = \frac{\lambda}{a^2 + p\lambda}, \qquad \bar\eta = \frac{a \eta}{a^2 + p\lambda}, \qquad
    \lambda = \bar\lambda + \frac{k^2}{r^2}, \qquad \eta = \bar\eta + \frac{k v}{r^2}$$
    $$y = W_{\mathrm{out}}\Bigl(\bigl(\textstyle\sum_i q_i \eta_i/\lambda_i + \rho z'\bigr) \odot
    \mathrm{SiLU}(g)\Bigr)$$

    with unit k and q, for every channel and state. Δ, ℓ and the process noise $p_c$ are learned for every entry of
    memory and constant in time, an Ornstein–Uhlenbeck process. The published block is the one with num_heads = 1, where
    all channels share a key and a skip ρ; more heads split the channels.

    Args:
        head_dim: D, the number of states of each channel, 16 in the paper.
        value_dim: the inner width is num_heads·value_dim; default 2·hidden_size/num_heads.
        short_convolution: default 4; None for SiLU alone.

    `FilterLayer` documents the arguments that all layers share.

    Steps Δ start log-uniformly between 0.001 and 0.1, rates $e^\ell$ at 1, $p_c$ at 0.01, ρ at −1. There is no norm.

    Examples:
        >>> KLA(hidden_size=64, num_heads=1, head_dim=16).state_size()
        LayerStateSize(mean=2048, covariance=2048, convolution=384)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        value_dim = expanded_value_dim(hidden_size, num_heads, value_dim)
        super().__init__(catalogue["kla"], hidden_size, num_heads, head_dim, value_dim, method=method, backend=backend)
        inner, entries = num_heads * value_dim, (num_heads, head_dim, value_dim)
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv1d = None if short_convolution is None else ShortConvolution(inner, short_convolution, bias=True)
        self.sensor_proj = nn.Linear(inner, 2 * (inner + num_heads * head_dim), bias=False)
        self.delta = nn.Parameter(torch.empty(entries))
        self.lambda_log = nn.Parameter(torch.empty(entries))
        self.process_noise = nn.Parameter(torch.empty(entries))
        self.lambda_skip = nn.Parameter(torch.empty(num_heads))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of steps, rates, process noise, skip and convolution."""
        super().reset_parameters()
        start_steps(self.delta)
        nn.init.zeros_(self.lambda_log)
        nn.init.constant_(self.process_noise, 0.01)
        nn.init.constant_(self.lambda_skip, -1.0)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and queries, values, drifts and noises of x; keep z' and the gate for the read-out."""
        H, inner, keys = self.num_heads, self.num_heads * self.value_dim, self.num_heads * self.key_dim
        z, gate = self.in_proj(x).chunk(2, -1)
        z, new = convolved(self.conv1d, z, tails, cu_seqlens)
        parts = self.sensor_proj(z).split([inner, inner, keys, keys], -1)
        v, noise, k, q = (part.unflatten(-1, (H, -1)) for part in parts)
        rate, step = wide(self.lambda_log).exp(), F.softplus(wide(self.delta)) + 1e-7
        process_noise = wide(self.process_noise).clamp_min(LEAST_PROCESS_NOISE)
        entries = (*x.shape[:2], H, self.key_dim, self.value_dim)
        parameters = {
            "log_decay": (-step * rate).expand(entries),
            "process_noise": (process_noise / (2 * rate) * -torch.expm1(-2 * rate * step)).expand(entries),
            "write_noise": F.softplus(wide(noise)) + LEAST_WRITE_NOISE,
        }
        return StepInputs(unit(q), unit(k), v, parameters, aside=(z, gate)), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Add the skip, gate, and project back to the width."""
        z, gate = inputs.aside
        y = wide(y) + wide(self.lambda_skip)[:, None] * wide(z).unflatten(-1, y.shape[-2:])
        return self.out_proj((y.flatten(-2) * F.silu(wide(gate))).to(x.dtype))
