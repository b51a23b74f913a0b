"""Longhorn's block in full, with the closed form of its objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import convolved, expanded_value_dim

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class Longhorn(FilterLayer):
    r"""Longhorn: each token's write solves an online regression, channel by channel (Liu et al., ICLR 2025).

    $$(u, z) = W_\mathrm{in}\, x, \qquad x' = \mathrm{SiLU}(\mathrm{conv}(u) + b_\mathrm{conv}), \qquad
    (\delta, k, q) = W_x x', \qquad \beta_t = \sigma(W_\Delta \delta_t + b)$$
    $$m_t^{(j)} = \arg\min_m \lVert m - m_{t-1}^{(j)}\rVert^2 + \beta_{t,j} (m^\top k_t - x'_{t,j})^2
    = m_{t-1}^{(j)} + \frac{\beta_{t,j}}{1 + \beta_{t,j}\lVert k_t\rVert^2} k_t (x'_{t,j} - k_t^\top m_{t-1}^{(j)})$$
    $$y_t = W_\mathrm{out}\bigl((M_t^\top q_t + D \odot x'_t) \odot \mathrm{SiLU}(z_t)\bigr)$$

    Liu, Wang, Wu, Feng, Stone & Liu, Longhorn: State Space Models are Amortized Online Learners. This layer runs that
    closed form. Longhorn's own scan keeps only the diagonal of $k_t k_t^\top$ in it, so that every entry of the memory
    has a recurrence of its own; outputs of the two differ, parameters have the same names and shapes. In the terms of
    the design, $\lambda_{t,j} = \beta_{t,j}$ and $r_t^2 = 1$.

    Longhorn has one key and one query for all channels. So heads only part the inner width into groups of columns: any
    num_heads with the same num_heads·value_dim gives the same outputs.

    Args:
        head_dim: D, the size of keys, which Longhorn calls its state size.
        value_dim: the inner width is num_heads·value_dim; default 2·hidden_size/num_heads.
        short_convolution: width of the convolution on x', default 4; None for SiLU alone.

    `FilterLayer` documents the arguments that all layers share.

    δ has hidden_size/16 channels, rounded up. Gates start at β = 1/2 plus what the input gives, the skip D at 1. There
    is no norm.

    Examples:
        >>> Longhorn(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=2048, covariance=0, convolution=384)
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
        super().__init__(
            catalogue["longhorn"], hidden_size, num_heads, head_dim, value_dim, method=method, backend=backend
        )
        inner = num_heads * value_dim
        self.rank = -(-hidden_size // 16)
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv1d = None if short_convolution is None else ShortConvolution(inner, short_convolution, bias=True)
        self.x_proj = nn.Linear(inner, self.rank + 2 * head_dim, bias=False)
        self.dt_head = nn.Linear(self.rank, inner)
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of gates, skip and convolution."""
        super().reset_parameters()
        nn.init.zeros_(self.dt_head.bias)
        nn.init.ones_(self.D)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute the query and key that all heads share, x' as values, and β of every column; keep z."""
        inner, z = self.in_proj(x).chunk(2, -1)
        inner, new = convolved(self.conv1d, inner, tails, cu_seqlens)
        low, k, q = self.x_proj(inner).split([self.rank, self.key_dim, self.key_dim], -1)
        gate = wide(self.dt_head(low)).sigmoid()
        gate = gate.clamp(min=torch.finfo(gate.dtype).tiny)  # a prior variance is above zero; a sigmoid may not be
        q, k = (y[..., None, :].expand(-1, -1, self.num_heads, -1) for y in (q, k))
        v, gate = (y.unflatten(-1, (self.num_heads, self.value_dim)) for y in (inner, gate))
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast a linear map is in half precision, a convolution is not
        return StepInputs(q, k, v, {"prior_variance": gate, "write_noise": 1.0}, aside=(inner, z)), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Add the skip, gate, and project back to the width."""
        inner, z = inputs.aside
        y = (wide(y).flatten(-2) + wide(self.D) * inner) * F.silu(wide(z))
        return self.out_proj(y.to(x.dtype))
