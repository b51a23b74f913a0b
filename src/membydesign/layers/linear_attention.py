"""Linear attention with its normaliser."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import positive
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import NOISELESS

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class LinearAttention(FilterLayer):
    r"""Linear attention: a softmax replaced by a positive feature map (Katharopoulos et al., ICML 2020).

    $$q, k, v = W_{q,k,v}\, x, \qquad \phi(z) = \mathrm{elu}(z) + 1$$
    $$S_t = S_{t-1} + \phi(k_t) v_t^\top, \qquad z_t = z_{t-1} + \phi(k_t), \qquad
    y_t = W_o\,\frac{S_t^\top \phi(q_t)}{z_t^\top \phi(q_t) + \epsilon}$$

    Katharopoulos, Vyas, Pappas & Fleuret, Transformers are RNNs. The normaliser $z_t$ is one more column of the memory,
    $M_t = (S_t, z_t)$, to which every token writes a one. So the memory has M = value_dim + 1 columns, and `value_dim`
    of the layer and `state_size` count it. The design is the noiseless additive write, $\lambda_t = 1$ and $r_t^2 = 0$.
    There is no convolution, gate or norm.

    Args:
        value_dim: columns of values of each head, without that of the normaliser.
        norm_eps: ε added to the normaliser.

    `FilterLayer` documents the arguments that all layers share.

    Examples:
        >>> LinearAttention(hidden_size=64, num_heads=2, head_dim=16).state_size()  # 2 · 16 · (16 + 1)
        LayerStateSize(mean=544, covariance=0, convolution=0)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        norm_eps: float = 1e-6,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        columns = head_dim if value_dim is None else positive("value_dim", value_dim)
        super().__init__(
            catalogue["linear_attention"], hidden_size, num_heads, head_dim, columns + 1, method=method, backend=backend
        )
        self.norm_eps = norm_eps
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_heads * columns, bias=False)
        self.o_proj = nn.Linear(num_heads * columns, hidden_size, bias=False)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute features of queries and keys, and values with a one appended."""
        del tails, cu_seqlens
        # In float32 at least, since the normaliser grows with the sequence: half precision would soon stop counting.
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (wide(y).unflatten(-1, (self.num_heads, -1)) for y in projected)
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        return StepInputs(_features(q), _features(k), v, NOISELESS), ()

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Divide values by the normaliser, and project back to the width."""
        del inputs
        mean = y[..., :-1] / (y[..., -1:] + self.norm_eps)
        return self.o_proj(mean.flatten(-2).to(x.dtype))


def _features(z: Tensor) -> Tensor:
    """elu(z) + 1, which is e^z below zero; adding the one to elu would round small features away."""
    return z.clamp(max=0).exp() + F.relu(z)
