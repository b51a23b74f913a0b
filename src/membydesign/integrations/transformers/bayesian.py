r"""Recurrent layers of Transformers models with a dense covariance: what `retrofit` puts into them.

A Bayesian layer is the teacher's own layer, with its projections, short convolution, decays, gates, norm and output,
in which the filter of a Bayesian Layer stands where the delta rule was:

    log α_t the teacher's,  r_t² = 1/β_t − ‖k_t‖² or −log β_t + ε,   P_0 = I,   ℓ_t² = softplus(W x_t + b) + ε or 1−α_t²

So a first write has the gain 1/(‖k‖² + r²) = β_t where the noise is "gate" and the drift stationary. A state is
[B,H,D,M+D]: mean and covariance side by side in the one tensor that Transformers' cache keeps.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from membydesign.belief import Belief
from membydesign.design import (
    DampedRotation,
    Dense,
    DesignModel,
    DiagonalDecay,
    Learned,
    ObserveMemory,
    ScalarDecay,
    Stationary,
)
from membydesign.design.sources import FLOOR
from membydesign.filter import filter_sequence, filter_step
from membydesign.integrations.transformers import convolution, delta_rule
from membydesign.integrations.transformers.acceleration import forward_with, replaced_functions
from membydesign.integrations.transformers.packing import boundaries
from membydesign.layers.base import unit
from membydesign.layers.parameters import LearnedParameter
from membydesign.layers.projected import for_every_head

if TYPE_CHECKING:
    from collections.abc import Callable

LAST_GATE = 16.0
"""Largest |log r²| of noise from a gate: beyond it a gate is 0 or 1 in float32."""


class Options(TypedDict):
    """What a Bayesian layer assumes.

    Attributes:
        transition: "scalar" keeps the teacher's decay for each head, "diagonal" has one for each row, "rotation" also
            turns pairs of rows.
        process_noise: "learned" ℓ², from the input; or "stationary", what decay takes from P_0 = I.
        write_noise: "gate" or "softplus".
    """

    transition: Literal["scalar", "diagonal", "rotation"]
    process_noise: Literal["learned", "stationary"]
    write_noise: Literal["gate", "softplus"]


class BayesianMemory(nn.Module):
    """What a Bayesian layer has besides its teacher's parts; a base of the classes that `bayesian` makes.

    Args:
        config: of the whole model, with `bayesian_options`.
        layer_idx: of the layer.
    """

    teacher: type[nn.Module]
    A_log: Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.options: Options = config.bayesian_options
        self.heads = config.linear_num_heads if self.has_row_decays else config.linear_num_value_heads
        self.key_dim_of_head = config.linear_head_dim if self.has_row_decays else config.linear_key_head_dim
        kinds = {"scalar": ScalarDecay(), "diagonal": DiagonalDecay(), "rotation": DampedRotation()}
        drift = kinds[self.options["transition"]]
        stationary = self.options["process_noise"] == "stationary"
        self.design = DesignModel(Stationary(drift) if stationary else drift, ObserveMemory(), Dense())
        if not stationary:
            source = Learned(0.05)
            self.process_noise = LearnedParameter("process_noise", source, config.hidden_size, (self.heads,), ">= 0")
        if self.options["transition"] == "diagonal" and not self.has_row_decays:
            self.row_rate = nn.Parameter(torch.zeros(self.heads, self.key_dim_of_head))
        if self.options["transition"] == "rotation":
            self.angle = nn.Parameter(torch.zeros(self.heads, self.key_dim_of_head // 2))

    @property
    def has_row_decays(self) -> bool:
        """Whether the teacher is a KDA."""
        return "chunk_kimi_delta_attention" in replaced_functions(self.teacher)

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the teacher's forward on the filter."""

        def filtered(*tensors: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
            q, k, v = tensors
            q, k, v = unit(q.float()) * q.shape[-1] ** -0.5, unit(k.float()), v.float()
            q, k = for_every_head(q, v.shape[2]), for_every_head(k, v.shape[2])
            parameters = self._step_parameters(hidden_states, attention_mask, k, g.float(), beta.float())
            output, state = self._filter(q, k, v, parameters, options)
            return output.to(tensors[0].dtype), state

        forward = forward_with(self.teacher, dict.fromkeys(self._rules, filtered) | self._convolutions)
        return forward(self, hidden_states, cache_params, attention_mask, **kwargs)

    @functools.cached_property
    def _rules(self) -> list[str]:
        return [name for name in replaced_functions(self.teacher) if name in delta_rule.REPLACEMENTS]

    @functools.cached_property
    def _convolutions(self) -> dict[str, Callable[..., Any]]:
        originals = replaced_functions(self.teacher)
        return {name: r.instead_of(originals[name]) for name, r in convolution.REPLACEMENTS.items()}

    def _step_parameters(
        self, x: Tensor, mask: Tensor | None, k: Tensor, g: Tensor, beta: Tensor
    ) -> dict[str, Tensor | float]:
        """The step parameters of the design. Padding neither fades nor adds noise, so that P stays its prior."""
        if mask is not None:
            g = g * mask.view(*mask.shape, *[1] * (g.ndim - 2))
        gate = beta.clamp(FLOOR**2, 1)  # OLMo-Hybrid has gates up to 2, which no filter's gain can be
        if self.options["write_noise"] == "gate":
            noise = ((1 - gate) / gate + (1 - k.square().sum(-1))).clamp(math.exp(-LAST_GATE), math.exp(LAST_GATE))
        else:
            noise = FLOOR - gate.log()
        parameters: dict[str, Tensor | float] = {"write_noise": noise, "log_decay": g}
        if self.options["transition"] == "diagonal" and g.ndim == 3:
            parameters["log_decay"] = g.unsqueeze(-1) * self.row_rate.float().exp()
        if self.options["transition"] == "rotation":
            steps = (-g / self.A_log.float().exp()).unsqueeze(-1)
            parameters["angle"] = steps * self.angle.float()
            parameters["log_decay"] = g.unsqueeze(-1).expand_as(parameters["angle"])
        if self.options["process_noise"] == "stationary":
            parameters["stationary_variance"] = 1.0
        else:
            drift = self.process_noise(x)
            parameters["process_noise"] = drift if mask is None else drift * mask.unsqueeze(-1)
        return parameters

    def _filter(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        columns, state = v.shape[-1], options.get("initial_state")
        belief = None
        if state is not None:
            state = state.float()
            belief = Belief(state[..., :columns].contiguous(), state[..., columns:].unsqueeze(2).contiguous())
        bounds = boundaries(q.shape[1], options)
        if belief is not None and q.shape[1] == 1:
            now = {name: p[:, 0] if isinstance(p, Tensor) else p for name, p in parameters.items()}
            output, belief = filter_step(self.design, belief, q[:, 0], k[:, 0], v[:, 0], **now)
            output = output.unsqueeze(1)
        else:
            packed = None if bounds is None else torch.tensor(bounds, device=q.device)
            result = filter_sequence(self.design, q, k, v, initial=belief, cu_seqlens=packed, **parameters)
            output, belief = result.output, result.belief
        if not options.get("output_final_state"):
            return output, None
        return output, torch.cat((belief.mean, belief.covariance[:, :, 0]), -1)


@functools.cache
def bayesian(teacher: type[nn.Module]) -> type[Any]:
    """The Bayesian layer that inherits all parameters of a teacher's class."""
    return type(f"Bayesian{teacher.__name__}", (BayesianMemory, teacher), {"teacher": teacher, "__doc__": __doc__})
