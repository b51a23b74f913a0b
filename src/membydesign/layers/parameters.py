r"""How a layer turns its input into step parameters: one module for each source that `membydesign.design` describes.

`Spectrum` becomes `Drift`, whose decays stay below one whatever its weights are; `Learned`, `Gate` and numbers become a
`LearnedParameter`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import Gate, Learned, Spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design import Design
    from membydesign.design.schema import Bound
    from membydesign.design.sources import Source

DEFAULTS: Mapping[str, Source] = {
    "> 0": Learned(0.5),
    ">= 0": Learned(0.05),
    "<= 0": Learned(-0.05),
    "[0, 1]": Learned(0.5),
    "finite": Learned(0.0),
}
"""Where a step parameter comes from if its design does not name a source, by its bound."""


def wide(x: Tensor) -> Tensor:
    """Convert x to float32 at least: step parameters are never in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_softplus(y: Tensor) -> Tensor:
    """Return the x whose softplus is y > 0."""
    return y + torch.log(-torch.expm1(-y))


def sources_of(design: Design, overrides: Mapping[str, Source | None] | None = None) -> dict[str, Source]:
    """Return the source of every step parameter of a design: overridden, named by the design, or by its bound.

    Args:
        design: the assumptions.
        overrides: by name; None stands for no override.
    """
    chosen = {name: source for name, source in (overrides or {}).items() if source is not None}
    names = [parameter.name for parameter in design.step_parameters]
    for name, source in chosen.items():
        if name not in names:
            raise ValueError(f"{name}: expected None, since {design.title} has none, got {source!r}")
    named = {**{p.name: DEFAULTS[p.bound] for p in design.step_parameters}, **design.sources(), **chosen}
    return {name: named[name] for name in names}


class LearnedParameter(nn.Module):
    """A step parameter for every token and head.

    Args:
        name: the step parameter.
        source: `Learned`, `Gate` or a number.
        hidden_size: the width of x.
        shape: axes after [B,T].
        bound: the values it may take.
    """

    def __init__(
        self, name: str, source: Source, hidden_size: int, shape: tuple[int, ...], bound: Bound = "> 0"
    ) -> None:
        super().__init__()
        self.name, self.source, self.shape, self.bound = name, source, shape, bound
        self._refuse_bad_source()
        if isinstance(source, (Learned, Gate)):
            self.weight = nn.Parameter(torch.empty(math.prod(shape), hidden_size))
            self.bias = nn.Parameter(torch.empty(math.prod(shape)))
            self.reset_parameters()

    def _refuse_bad_source(self) -> None:
        name, source, bound = self.name, self.source, self.bound
        variance = bound in ("> 0", ">= 0")
        if isinstance(source, Gate):
            if name not in ("prior_variance", "write_noise"):
                raise ValueError(f"{name}: expected no Gate, which is a ratio of prior_variance and write_noise")
        elif isinstance(source, Learned):
            if variance and source.initial <= source.floor:
                raise ValueError(f"Learned(initial): expected a variance above {source.floor}, got {source.initial!r}")
            if (bound == "<= 0" and source.initial >= 0) or (bound == "[0, 1]" and not 0 < source.initial < 1):
                within = "below 0" if bound == "<= 0" else "between 0 and 1"
                raise ValueError(f"Learned(initial): expected a number {within} for {name}, got {source.initial!r}")
        elif isinstance(source, bool) or not isinstance(source, (int, float)) or (variance and not source >= 0):
            kind = "a variance of at least 0" if variance else "a number"
            raise ValueError(f"{name}: expected Learned(…), Gate(…) or {kind}, got {source!r}")

    def reset_parameters(self) -> None:
        """Start at the source's initial value for every token: weights begin at zero (small if nothing bounds them)."""
        if isinstance(self.source, (int, float)):
            return
        if self.bound == "finite":
            nn.init.normal_(self.weight, std=0.02)
        else:
            nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self._initial_logit())

    def _initial_logit(self) -> float:
        source = self.source
        assert isinstance(source, (Learned, Gate))
        if isinstance(source, Gate) or self.bound == "[0, 1]":
            return math.log(source.initial / (1 - source.initial))
        if self.bound == "finite":
            return source.initial
        return math.log(math.expm1(-source.initial if self.bound == "<= 0" else source.initial - source.floor))

    def forward(self, x: Tensor) -> Tensor | float:
        """Compute the values for x, [B,T,hidden_size]: [B,T,*shape], or the fixed number."""
        if isinstance(self.source, (int, float)):
            return float(self.source)
        logits = wide(F.linear(x, self.weight)) + wide(self.bias)
        if len(self.shape) > 1:
            logits = logits.unflatten(-1, self.shape)
        if isinstance(self.source, Gate):
            # Relative to a variance of one: λ = e^z for r² = 1, r² = e^{-z} for λ = 1. Beyond 16 a gate is 0 or 1.
            return (logits if self.name == "prior_variance" else -logits).clamp(-16, 16).exp()
        if self.bound in ("> 0", ">= 0"):
            assert isinstance(self.source, Learned)
            return F.softplus(logits) + self.source.floor
        if self.bound == "<= 0":
            return -F.softplus(logits)
        return logits.sigmoid() if self.bound == "[0, 1]" else logits

    def extra_repr(self) -> str:
        """Show the parameter and its source."""
        return f"{self.name}={self.source}"


class Drift(nn.Module):
    r"""Decays and angles from the input.

    $$\log\rho_t = -\Delta_t e^{A_{\mathrm{radius}}}, \qquad \theta_t = \Delta_t A_{\mathrm{angle}}$$

    Each head has one step size $\Delta_t = \mathrm{softplus}(W_A x_t + A_{\mathrm{step}})$, and one radius per entry of
    the decay: one for `ScalarDecay`, one for each row of `DiagonalDecay` or pair of rows of `DampedRotation`, which
    also has an angle. So decays are at most one whatever the weights are.

    Steps start between 0.001 and 0.1, log-uniform over heads, and rates $e^{A_{\mathrm{radius}}}$ at 1, so that heads
    begin with memories of 10 to 1,000 tokens. Angles start from 0 to π per unit of Δ, spread over the pairs: slow turns
    in every head, and none that aliases.

    Args:
        spectrum: which step parameters it computes; None for a memory without drift.
        hidden_size: the width of x.
        num_heads: H.
        shape: axes of the decay after [B,T,H].
    """

    def __init__(
        self, spectrum: Spectrum | None, hidden_size: int, num_heads: int, shape: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.spectrum, self.shape = spectrum, shape
        if spectrum is None:
            return
        self.W_A = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.A_step = nn.Parameter(torch.empty(num_heads))
        self.A_radius = nn.Parameter(torch.empty(num_heads, *shape))
        self.A_angle = None if spectrum.angle is None else nn.Parameter(torch.empty(num_heads, *shape))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Show the step parameters that it computes."""
        return "none" if self.spectrum is None else repr(self.spectrum)

    def reset_parameters(self) -> None:
        """Start with memories of 10 to 1,000 tokens, turns from 0 to π per unit of Δ, and weights at zero."""
        if self.spectrum is None:
            return
        heads = len(self.A_step)
        steps = torch.logspace(-3, -1, heads) if heads > 1 else torch.full((1,), 0.01)
        nn.init.zeros_(self.W_A)
        nn.init.zeros_(self.A_radius)
        start_at(self.A_step, inverse_softplus(steps))
        if self.A_angle is not None:
            turns = torch.linspace(0, math.pi, self.A_angle.shape[-1] + 1)[:-1]
            start_at(self.A_angle, turns.expand(self.A_angle.shape))

    def forward(self, x: Tensor) -> dict[str, Tensor | float]:
        """Compute the step parameters of x, [B,T,hidden_size], by name."""
        if self.spectrum is None:
            return {}
        step = F.softplus(wide(F.linear(x, self.W_A)) + wide(self.A_step))
        step = step[(..., *[None] * len(self.shape))]
        drift: dict[str, Tensor | float] = {self.spectrum.decay: -step * wide(self.A_radius).exp()}
        if self.A_angle is not None and self.spectrum.angle is not None:
            drift[self.spectrum.angle] = step * wide(self.A_angle)
        return drift


def start_at(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter its starting value, unless Transformers has just loaded it.

    Transformers patches the functions of `torch.nn.init` to leave loaded weights alone, and none of them copies a
    tensor. So one of them first fills the parameter with NaN; a parameter that keeps its values was loaded and is not
    overwritten. Nothing happens on the meta device.
    """
    if parameter.is_meta:
        return
    with torch.no_grad():
        nn.init.constant_(parameter, math.nan)
        if parameter.isnan().all():
            parameter.copy_(value)
