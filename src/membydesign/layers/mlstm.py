"""mLSTM: the matrix memory of xLSTM, in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import start_at, wide

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method

SMALLEST_INPUT_GATE = -10.0
"""The logarithm at which input gates start."""


@final
class MLSTM(FilterLayer):
    r"""mLSTM: linear attention with exponential input gates and a normaliser (Beck et al., xLSTM, NeurIPS 2024).

    $$q, k, v = W_q x,\ W_k x,\ W_v x, \qquad \tilde\imath_t = c\tanh((W_i x_t + b_i)/c), \qquad
    f_t = \sigma\bigl(c\tanh((W_f x_t + b_f)/c)\bigr)$$
    $$C_t = f_t C_{t-1} + e^{\tilde\imath_t} k_t v_t^\top, \qquad n_t = f_t n_{t-1} + e^{\tilde\imath_t} k_t, \qquad
    h_t = \frac{C_t^\top q_t/\sqrt D}{\max(|n_t^\top q_t/\sqrt D|, 1)}$$
    $$y_t = W_o\bigl(\sigma(W_g x_t) \odot \mathrm{LayerNorm}(h_t)\bigr)$$

    The layer of xLSTM 7B: no convolutions, gates capped at c. Parameters have the names and shapes that Transformers'
    `xLSTMLayer` gives them, so that its checkpoints load.

    Args:
        value_dim: default 2·head_dim.
        gate_cap: c, the largest logit of a gate.

    `FilterLayer` documents the arguments that all layers share.

    Input gates start at $e^{-10}$ and forget gates between σ(3) and σ(6), for every token.

    Examples:
        >>> MLSTM(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=1024, covariance=34, convolution=0)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        gate_cap: float = 15.0,
        norm_eps: float = 1e-6,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        columns = 2 * head_dim if value_dim is None else value_dim
        super().__init__(catalogue["mlstm"], hidden_size, num_heads, head_dim, columns, method=method, backend=backend)
        if isinstance(gate_cap, bool) or not isinstance(gate_cap, (int, float)) or not gate_cap > 0:
            raise ValueError(f"gate_cap: expected a number above 0, got {gate_cap!r}")
        self.gate_cap = gate_cap
        keys, values = num_heads * head_dim, num_heads * columns
        self.q = nn.Linear(hidden_size, keys, bias=False)
        self.k = nn.Linear(hidden_size, keys, bias=False)
        self.v = nn.Linear(hidden_size, values, bias=False)
        self.ogate_preact = nn.Linear(hidden_size, values, bias=False)
        self.igate_preact = nn.Linear(hidden_size, num_heads)
        self.fgate_preact = nn.Linear(hidden_size, num_heads)
        self.multihead_norm = nn.LayerNorm(values, eps=norm_eps, bias=False)
        self.out_proj = nn.Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start gates as published: closed inputs, slow forgetting, the same for every token."""
        super().reset_parameters()
        for gate in (self.igate_preact, self.fgate_preact):
            nn.init.zeros_(gate.weight)
        nn.init.constant_(self.igate_preact.bias, SMALLEST_INPUT_GATE)
        start_at(self.fgate_preact.bias, torch.linspace(3.0, 6.0, self.num_heads, device="cpu"))

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute scaled queries, keys, values and gates of x."""
        del tails, cu_seqlens
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (self.q(x), self.k(x), self.v(x)))
        parameters: dict[str, Tensor | float] = {
            "log_decay": F.logsigmoid(self._capped(self.fgate_preact(x))),
            "log_input": self._capped(self.igate_preact(x)),
        }
        return StepInputs(q * self.key_dim**-0.5, k, v, parameters), ()

    def _capped(self, logits: Tensor) -> Tensor:
        return self.gate_cap * (wide(logits) / self.gate_cap).tanh()

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it, and project back to the width."""
        del inputs
        normed = F.layer_norm(wide(y), (self.value_dim,), eps=self.multihead_norm.eps).flatten(-2)
        normed = normed * wide(self.multihead_norm.weight)
        return self.out_proj((wide(self.ogate_preact(x)).sigmoid() * normed).to(x.dtype))
