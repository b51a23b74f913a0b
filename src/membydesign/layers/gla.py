"""Gated Linear Attention in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import NOISELESS, ProjectedLayer

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method

_RANK = 16
_TEMPERATURE = 16


@final
class GLA(ProjectedLayer):
    r"""Gated Linear Attention: additive writes to rows that fade each at its own rate (Yang et al., ICML 2024).

    $$q, k, v = W_{q,k,v}\, x, \qquad
    \log\alpha_t = \tfrac1{16}\log\sigma(W_\alpha^\uparrow W_\alpha^\downarrow x_t + b) \in \mathbb R^{H\times D}$$
    $$M_t = \mathrm{diag}(\alpha_t) M_{t-1} + k_t v_t^\top, \qquad
    y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top q_t / \sqrt{D}) \odot \mathrm{SiLU}(W_g x_t)\bigr)$$

    Yang, Wang, Shen, Panda & Kim, Gated Linear Attention Transformers with Hardware-Efficient Training. The gate passes
    through 16 channels; its temperature, 16 too, makes memories begin long. The design is the noiseless additive write,
    $\lambda_t = 1$ and $r_t^2 = 0$.

    Args:
        value_dim: default 2·head_dim, since the paper's keys have half the width of its values.

    `FilterLayer` documents the arguments that all layers share.

    Examples:
        >>> GLA(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=1024, covariance=0, convolution=0)
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
            catalogue["gla"],
            hidden_size,
            num_heads,
            head_dim,
            2 * head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, _RANK, bias=False), nn.Linear(_RANK, num_heads * head_dim, bias=True)
        )
        self.add_read_out(True, norm_eps)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute scaled queries, keys, values and decays of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens)
        gates = wide(self.gk_proj(x)).unflatten(-1, (self.num_heads, self.key_dim))
        log_decay = F.logsigmoid(gates) / _TEMPERATURE
        return StepInputs(q * self.key_dim**-0.5, k, v, {"log_decay": log_decay, **NOISELESS}), new
