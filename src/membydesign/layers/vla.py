"""Variational Linear Attention in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import unit
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import ProjectedLayer

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class VariationalLinearAttention(ProjectedLayer):
    r"""Variational Linear Attention: a delta rule whose direction a learned penalty bends (Pandey & Singh, 2026).

    $$q = \phi(W_q x), \qquad k = \mathrm{unit}(\phi(W_k x)), \qquad v = W_v x, \qquad
    u = \mathrm{unit}(W_u W_k x)/\sqrt D, \qquad \phi = 1 + \mathrm{ELU}$$
    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad A_0 = \tfrac1{10} I, \qquad
    M_t = M_{t-1} + \mathrm{unit}(A_t k_t) (v_t - M_{t-1}^\top k_t)^\top$$
    $$y_t = W_o\, \mathrm{LayerNorm}(M_t^\top q_t)$$

    The third version of the authors' code, with two differences. It divides reads by $q_t^\top \sum_s \phi(W_k x_s)$; a
    positive factor of a whole head, which the norm of each head takes out again but for its ε, is not computed here.
    And it adds 0.001 to the diagonal of A every 20 tokens, against rounding; states here are float32 at least, and
    rounding that matters raises an error. The authors have one head; with several, each has its own norm, as W_u maps
    all heads' keys to all penalties.

    Args:
        short_convolution: default None.

    `FilterLayer` documents the arguments that all layers share.

    Examples:
        >>> VariationalLinearAttention(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=512, covariance=512, convolution=0)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = None,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["vla"],
            hidden_size,
            num_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.u_proj = nn.Linear(num_heads * head_dim, num_heads * head_dim, bias=False)
        self.norm = nn.LayerNorm(self.value_dim, eps=norm_eps)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute positive queries, positive unit keys, values and penalties of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens)
        u = unit(wide(self.u_proj(k.flatten(-2))).unflatten(-1, (self.num_heads, -1))) * self.key_dim**-0.5
        q, k = (1 + F.elu(y) for y in (q, k))
        return StepInputs(q, unit(k), v, {"penalty": u}), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, and project back to the width."""
        del inputs
        norm = self.norm
        normed = F.layer_norm(wide(y), norm.normalized_shape, wide(norm.weight), wide(norm.bias), norm.eps)
        return self.o_proj(normed.flatten(-2).to(x.dtype))
