r"""Where step parameters come from: how a layer turns its input into drifts and noises.

Drift, for every design with a decay: a spectrum and a step size from the input, as state-space models have it,

$$A_t = e^{\Delta_t (-e^{A_{\mathrm{radius}}} + i A_{\mathrm{angle}})}, \qquad
\Delta_t = \mathrm{softplus}(W_A x_t + A_{\mathrm{step}}),$$

so that $\lVert A_t\rVert \le 1$ whatever the parameters are. Noises: $\mathrm{softplus}(W x_t + b) + \epsilon$.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import DampedRotation, DiagonalDecay, Identity, ScalarDecay

if TYPE_CHECKING:
    from membydesign.design import Transition

FLOOR = 1e-4
"""ε: the smallest variance that a layer learns."""


def wide(x: Tensor) -> Tensor:
    """X in float32 at least: step parameters are never in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_softplus(y: Tensor) -> Tensor:
    """The x whose softplus is y > 0."""
    return y + torch.log(-torch.expm1(-y))


@final
@dataclass(frozen=True)
class Learned:
    """A variance learned from the input, softplus(Wx + b) + ε, starting at `initial` for every token."""

    initial: float

    def __post_init__(self) -> None:
        if not isinstance(self.initial, (int, float)) or not math.isfinite(self.initial) or self.initial <= FLOOR:
            raise ValueError(f"Learned(initial): expected a variance above {FLOOR}, got {self.initial!r}")


@final
@dataclass(frozen=True)
class Gate:
    r"""A ratio of variances learned from the input as a gate, $\lambda_t/(\lambda_t + r_t^2) = \sigma(Wx + b)$.

    It starts at `initial` for every token. With unit keys the gate is the strength of a delta rule's write.
    """

    initial: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.initial, (int, float)) or not 0 < self.initial < 1:
            raise ValueError(f"Gate(initial): expected a number between 0 and 1, got {self.initial!r}")


Source = Learned | Gate | float
"""Where a variance comes from: the input, or one number for every token."""


class Variance(nn.Module):
    """A variance for every token and head.

    Args:
        name: the step parameter that it gives.
        source: `Learned`, `Gate` or a number.
        hidden_size: the width of x.
        shape: axes after [B,T].
    """

    def __init__(self, name: str, source: Source, hidden_size: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.name, self.source, self.shape = name, source, shape
        if isinstance(source, (Learned, Gate)):
            self.weight = nn.Parameter(torch.empty(math.prod(shape), hidden_size))
            self.bias = nn.Parameter(torch.empty(math.prod(shape)))
            self.reset_parameters()
        elif isinstance(source, bool) or not isinstance(source, (int, float)) or not source >= 0:
            raise ValueError(f"{name}: expected Learned(…), Gate(…) or a variance of at least 0, got {source!r}")

    def reset_parameters(self) -> None:
        """Start at the source's initial value, for every token: weights begin at zero."""
        if isinstance(self.source, (int, float)):
            return
        nn.init.zeros_(self.weight)
        if isinstance(self.source, Gate):
            start = math.log(self.source.initial / (1 - self.source.initial))
        else:
            start = math.log(math.expm1(self.source.initial - FLOOR))
        nn.init.constant_(self.bias, start)

    def forward(self, x: Tensor) -> Tensor | float:
        """The variances of x, [B,T,hidden_size]: [B,T,*shape], or the one number."""
        if isinstance(self.source, (int, float)):
            return float(self.source)
        logits = wide(F.linear(x, self.weight)) + wide(self.bias)
        if len(self.shape) > 1:
            logits = logits.unflatten(-1, self.shape)
        if isinstance(self.source, Learned):
            return F.softplus(logits) + FLOOR
        # Beside a variance of one: λ = e^z for r² = 1, r² = e^{-z} for λ = 1. Beyond 16 a gate is 0 or 1 in float32.
        return (logits if self.name == "prior_variance" else -logits).clamp(-16, 16).exp()

    def extra_repr(self) -> str:
        """What it gives."""
        return f"{self.name}={self.source}"


class Drift(nn.Module):
    r"""Decays and angles from the input.

    $$\log\rho_t = -\Delta_t e^{A_{\mathrm{radius}}}, \qquad \theta_t = \Delta_t A_{\mathrm{angle}}$$

    One step size $\Delta_t = \mathrm{softplus}(W_A x_t + A_{\mathrm{step}})$ per head; one radius per head
    (`ScalarDecay`), row (`DiagonalDecay`) or pair of rows (`DampedRotation`), and there an angle too.

    Steps start between 0.001 and 0.1, log-uniform over heads, and rates $e^{A_{\mathrm{radius}}}$ at 1, so that heads
    begin with memories of 10 to 1,000 tokens. Angles start from 0 to π per unit of Δ, spread over the pairs: slow turns
    in every head, and none that aliases.

    Args:
        transition: of the design.
        hidden_size: the width of x.
        num_heads: H.
        key_dim: D.
    """

    def __init__(self, transition: Transition, hidden_size: int, num_heads: int, key_dim: int) -> None:
        super().__init__()
        self.transition = transition
        match transition:
            case Identity():
                return
            case ScalarDecay():
                spectrum: tuple[int, ...] = (num_heads,)
            case DiagonalDecay():
                spectrum = (num_heads, key_dim)
            case DampedRotation():
                spectrum = (num_heads, key_dim // 2)
            case _:
                known = "Identity, ScalarDecay, DiagonalDecay or DampedRotation"
                raise ValueError(
                    f"design: expected a transition that a layer can parametrise, {known}, "
                    f"got {type(transition).__name__}; derive from FilterLayer to give it parameters of its own"
                )
        self.W_A = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.A_step = nn.Parameter(torch.empty(num_heads))
        self.A_radius = nn.Parameter(torch.empty(spectrum))
        if isinstance(transition, DampedRotation):
            self.A_angle = nn.Parameter(torch.empty(spectrum))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """The transition that it drives."""
        return repr(self.transition)

    def reset_parameters(self) -> None:
        """Memories of 10 to 1,000 tokens, turns from 0 to π per unit of Δ, and weights at zero."""
        if isinstance(self.transition, Identity):
            return
        heads = len(self.A_step)
        steps = torch.logspace(-3, -1, heads) if heads > 1 else torch.full((1,), 0.01)
        nn.init.zeros_(self.W_A)
        nn.init.zeros_(self.A_radius)
        start_at(self.A_step, inverse_softplus(steps))
        if isinstance(self.transition, DampedRotation):
            pairs = self.A_angle.shape[-1]
            turns = torch.linspace(0, math.pi, pairs + 1)[:-1]
            start_at(self.A_angle, turns.expand(self.A_angle.shape))

    def forward(self, x: Tensor) -> dict[str, Tensor | float]:
        """`log_decay` and `angle` of x, [B,T,hidden_size], as the transition asks for them."""
        if isinstance(self.transition, Identity):
            return {}
        step = F.softplus(wide(F.linear(x, self.W_A)) + wide(self.A_step))
        rate = wide(self.A_radius).exp()
        if isinstance(self.transition, ScalarDecay):
            return {"log_decay": -step * rate}
        found: dict[str, Tensor | float] = {"log_decay": -step[..., None] * rate}
        if isinstance(self.transition, DampedRotation):
            found["angle"] = step[..., None] * wide(self.A_angle)
        return found


def start_at(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter its starting value, in a way that whoever guards `torch.nn.init` guards this too.

    Transformers makes the functions of `torch.nn.init` leave loaded weights alone; there is none that copies. So one of
    them is asked to mark the parameter first, and nothing is copied over a parameter that keeps its values, nor where
    there is no storage.
    """
    if parameter.is_meta:
        return
    with torch.no_grad():
        nn.init.constant_(parameter, math.nan)
        if parameter.isnan().all():
            parameter.copy_(value)
