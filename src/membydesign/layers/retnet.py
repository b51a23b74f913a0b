"""RetNet's multi-scale retention in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import DampedRotation, catalogue
from membydesign.layers.filtered import StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import NOISELESS, ProjectedLayer

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class RetNet(ProjectedLayer):
    r"""Retention: additive writes to a memory that fades at a fixed rate, with rotary positions (Sun et al., 2023).

    $$q, k, v = W_q x,\ W_k x/\sqrt{D},\ W_v x, \qquad \gamma_h = 1 - 2^{-5-h}, \qquad
    \theta_i = 10000^{-i/(D/2-1)}$$
    $$o_n = \sum_{m \le n} \gamma_h^{n-m} \bigl(R(n\theta) q_n\bigr)^\top \bigl(R(m\theta) k_m\bigr)\, v_m, \qquad
    y_n = W_o\bigl(\mathrm{GroupNorm}_h(o_n) \odot \mathrm{SiLU}(W_g x_n)\bigr)$$

    Sun, Dong, Huang, Ma, Xia, Xue, Wang & Wei, Retentive Network: A Successor to Transformer for Large Language Models.
    $R(n\theta)$ turns pairs of entries (2i, 2i+1), h counts heads from 0 and i pairs from 0. Only the distance n−m
    matters, so positions need no counting: the memory itself turns,

    $$M_n = \gamma_h R(-\theta) M_{n-1} + k_n v_n^\top, \qquad o_n = M_n^\top q_n,$$

    which is the same sum, and the paper's state seen from the token that reads it. GroupNorm has one group per head and
    no weights, as in the authors' code. It takes out the scale of $o_n$, and with it the score normalisations of the
    paper, which change nothing else.

    Args:
        head_dim: an even number.
        value_dim: default 2·head_dim.

    `FilterLayer` documents the arguments that all layers share.

    Examples:
        >>> RetNet(hidden_size=64, num_heads=2, head_dim=16).state_size()
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
            catalogue["retnet"].replace(transition=DampedRotation()),
            hidden_size,
            num_heads,
            head_dim,
            2 * head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.g_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False)
        self.group_norm = nn.LayerNorm(self.value_dim, eps=norm_eps, elementwise_affine=False)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute queries, scaled keys and values of x; decays and turns are the same for every token."""
        q, k, v, new = self.projected(x, tails, cu_seqlens)
        pairs = self.key_dim // 2
        shape = (*q.shape[:-1], pairs)
        # Computed in every call: a buffer would be rounded with the weights when a model is cast to half precision.
        like = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
        log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(self.num_heads, **like))))
        angle = -(10000.0 ** -torch.linspace(0, 1, pairs, **like))
        drift = {"log_decay": log_decay[:, None].expand(shape), "angle": angle.expand(shape)}
        return StepInputs(q, k * self.key_dim**-0.5, v, {**drift, **NOISELESS}), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it, and project back to the width."""
        del inputs
        assert self.g_proj is not None
        normed = self.group_norm(wide(y)).flatten(-2)
        return self.o_proj((normed * F.silu(wide(self.g_proj(x)))).to(x.dtype))
