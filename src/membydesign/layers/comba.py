"""Comba in full."""

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
class Comba(ProjectedLayer):
    r"""Comba: a memory in a closed loop, with feedback from its state and from its output (Hu et al., NeurIPS 2025).

    $$q, k, v = \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v} x)), \qquad \tilde k = \mathrm{unit}(k), \qquad
    \tilde q = \mathrm{unit}(q - d\,\sigma(b)\,k)/\sqrt{D}$$
    $$\log\alpha_t = -e^{A}\,\mathrm{softplus}(W_a x_t + c), \qquad \beta_t = \sigma(W_b x_t)$$
    $$M_t = (\alpha_t I - \sigma(b)\,\beta_t \tilde k_t \tilde k_t^\top) M_{t-1} + \beta_t \tilde k_t v_t^\top, \qquad
    y_t = W_o\bigl(\mathrm{RMSNorm}(M_t^\top \tilde q_t) \odot \sigma(W_g x_t)\bigr)$$

    b (`decay`) and d (`D`) have one entry per head. Parameters have the names and shapes that flash-linear-attention
    gives them. Its kernels bring the feedback key σ(b)k to length one as well, which takes σ(b) out of the feedback;
    here the feedback is weaker than the write by σ(b).

    Args:
        value_dim: default 2·head_dim.
        short_convolution: default 4; None for SiLU alone.
        correction: where d starts; the authors suggest to try 0.02 for small models, too.

    `FilterLayer` documents the arguments that all layers share.

    Rates $e^A$ start uniformly between 0 and 16, steps softplus(c) log-uniformly between 0.001 and 0.1, b at 1.

    Examples:
        >>> Comba(hidden_size=64, num_heads=2, head_dim=16).state_size()
        LayerStateSize(mean=1024, covariance=0, convolution=384)
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
        correction: float = 1.0,
        norm_eps: float = 1e-5,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            catalogue["comba"],
            hidden_size,
            num_heads,
            head_dim,
            2 * head_dim if value_dim is None else value_dim,
            short_convolution=short_convolution,
            method=method,
            backend=backend,
        )
        self.correction = correction
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log, self.dt_bias, self.decay, self.D = (nn.Parameter(torch.empty(num_heads)) for _ in range(4))
        self.add_read_out(output_gate, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of rates, steps, feedback, correction and convolutions."""
        super().reset_parameters()
        start_rates(self.A_log, 1e-2, 16)  # log 0 is not a number to learn from
        start_steps(self.dt_bias)
        nn.init.ones_(self.decay)
        nn.init.constant_(self.D, self.correction)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute unit keys, corrected unit queries, values, decays, feedback and write noises of x."""
        q, k, v, new = self.projected(x, tails, cu_seqlens, bare=F.silu)
        share, logits = wide(self.decay).sigmoid(), wide(self.b_proj(x))
        q = q - (wide(self.D) * share)[:, None].to(k.dtype) * k
        parameters: dict[str, Tensor | float] = {
            "log_decay": -wide(self.A_log).exp() * F.softplus(wide(self.a_proj(x)) + wide(self.dt_bias)),
            "feedback": share * logits.sigmoid(),
            "prior_variance": 1.0,
            "write_noise": logits.clamp(min=-64).neg().exp(),  # a trust of λ/(λ + r²) = β; below -64 it is zero
        }
        return StepInputs(unit(q) * self.key_dim**-0.5, unit(k), v, parameters), new

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, gate it if the layer has a gate, and project back to the width."""
        del inputs
        normed = rms_normed(y, self.o_norm).flatten(-2)
        return self.o_proj((normed if self.g_proj is None else normed * wide(self.g_proj(x)).sigmoid()).to(x.dtype))
