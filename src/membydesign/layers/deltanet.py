"""DeltaNet in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.projected import ProjectedLayer, delta_noises

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class DeltaNet(ProjectedLayer):
    r"""DeltaNet: a delta rule on a memory that does not fade (Yang, Wang, Zhang, Shen & Kim, NeurIPS 2024).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde q = \mathrm{unit}(q)/\sqrt{D}, \qquad
    \tilde k = \mathrm{unit}(k), \qquad \beta_t = \sigma(W_b x_t)$$
    $$M_t = M_{t-1} + \beta_t \tilde k_t (v_t - M_{t-1}^\top \tilde k_t)^\top, \qquad
    y_t = W_o\,\mathrm{RMSNorm}(M_t^\top \tilde q_t)$$

    The rule is that of Schlag, Irie & Schmidhuber (ICML 2021). In the terms of the design, $\lambda_t = 1$ and
    $r_t^2 = 1/\beta_t - \lVert\tilde k_t\rVert^2$. Parameters have the names that flash-linear-attention gives them.

    Args:
        short_convolution: default 4; None for SiLU alone.
        output_gate: default False.

    `FilterLayer` documents the arguments that all layers share.

    Examples:
        >>> DeltaNet(hidden_size=64, num_heads=2, head_dim=16).state_size()
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
        output_gate: bool = False,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["deltanet"],
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.add_read_out(output_gate, norm_eps)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and scaled unit queries, values and noises of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        q, k = unit(q), unit(k)
        return StepInputs(q * self.key_dim**-0.5, k, v, delta_noises(self.b_proj(x), k)), new
