"""Gated DeltaProduct in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import DeltaProduct
from membydesign.layers.base import positive, unit
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterLayer, StepInputs
from membydesign.layers.parameters import wide
from membydesign.layers.projected import rms_normed, start_rates, start_steps

if TYPE_CHECKING:
    from membydesign.filter.api import Backend, Method


@final
class GatedDeltaProduct(FilterLayer):
    r"""Gated DeltaProduct: several delta-rule writes for each token (Siems et al., NeurIPS 2025).

    $$q, k_{1..n}, v_{1..n} = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad
    \tilde q = \mathrm{unit}(q)/\sqrt{D}, \qquad \tilde k_j = \mathrm{unit}(k_j)$$
    $$\log a_t = -e^{A}\,\mathrm{softplus}(W_a x_t + b), \qquad \beta_{t,j} = 2\,\sigma(W_b x_t)_j$$
    $$M \leftarrow a_t M_{t-1}, \qquad
    M \leftarrow M + \beta_{t,j} \tilde k_{t,j} (v_{t,j} - M^\top \tilde k_{t,j})^\top \quad (j = 1, \ldots, n)$$
    $$y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t) \odot \mathrm{SiLU}(W_g x_t)\bigr)$$

    Parameters have the names and shapes that flash-linear-attention gives them.

    Args:
        value_dim: default 2·head_dim.
        short_convolution: default 4; None for SiLU alone.
        writes_per_token: n.
        largest_step: the β of a gate of one: 2, or 1 to keep eigenvalues positive.
        forget_gate: whether memory fades; a = 1 without.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 0 and 16, steps softplus(b) log-uniformly between 0.001 and 0.1.

    Examples:
        >>> GatedDeltaProduct(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=1024, covariance=0, convolution=672)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        short_convolution: int | None = 4,
        output_gate: bool = True,
        writes_per_token: int = 2,
        largest_step: float = 2.0,
        forget_gate: bool = True,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        n = positive("writes_per_token", writes_per_token)
        columns = 2 * head_dim if value_dim is None else value_dim
        design = DeltaProduct(writes_per_token=n, largest_step=largest_step)
        super().__init__(design, hidden_size, num_heads, head_dim, columns, method=method, backend=backend)
        self.writes_per_token = n
        keys, values = num_heads * head_dim, num_heads * columns
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, n * keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, n * values, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            None if short_convolution is None else ShortConvolution(channels, short_convolution)
            for channels in (keys, n * keys, n * values)
        )
        self.b_proj = nn.Linear(hidden_size, n * num_heads, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False) if forget_gate else None
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(num_heads)) if forget_gate else None for _ in range(2))
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if output_gate else None
        self.o_norm = nn.RMSNorm(columns, eps=norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps and convolutions."""
        super().reset_parameters()
        if self.A_log is not None and self.dt_bias is not None:
            start_rates(self.A_log, 1e-2, 16)  # log 0 is not a number to learn from
            start_steps(self.dt_bias)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys and values of all writes, scaled unit queries, decays and gates of x."""
        every, new = [], []
        old = (None, None, None) if tails is None or not tails else tails
        maps = (self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d)
        for (linear, convolution), tail in zip(maps, old, strict=True):
            y = linear(x)
            if convolution is None:
                y = F.silu(y)
            else:
                y, tail = convolution(y, tail, cu_seqlens)
                new.append(tail)
            every.append(y)
        q, k, v = every[0].unflatten(-1, (self.num_heads, -1)), self._of_writes(every[1]), self._of_writes(every[2])
        k = unit(k)
        parameters: dict[str, Tensor | float] = {
            "log_decay": 0.0,
            "gate": wide(self.b_proj(x)).sigmoid().unflatten(-1, (self.writes_per_token, -1)).mT,
        }
        if self.a_proj is not None and self.A_log is not None and self.dt_bias is not None:
            step = F.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))
            parameters["log_decay"] = -wide(self.A_log).exp() * step
        if self.writes_per_token > 1:
            parameters |= {"earlier_keys": wide(k[..., :-1, :]), "earlier_values": wide(v[..., :-1, :])}
        inputs = StepInputs(unit(q) * self.key_dim**-0.5, k[..., -1, :], v[..., -1, :], parameters)
        return inputs, tuple(new)

    def _of_writes(self, x: Tensor) -> Tensor:
        """[B,T,n·H·D] → [B,T,H,n,D]."""
        return x.unflatten(-1, (self.writes_per_token, self.num_heads, -1)).transpose(2, 3)

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it if the layer has a gate, and project back to the width."""
        del inputs
        normed = rms_normed(y, self.o_norm).flatten(-2)
        return self.o_proj((normed if self.g_proj is None else normed * F.silu(wide(self.g_proj(x)))).to(x.dtype))
