r"""Where a layer takes step parameters from: descriptions, which `membydesign.layers` turns into modules.

A design may name a source for each of its parameters; what it does not name follows from the parameter's bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

FLOOR = 1e-4
"""ε: the smallest variance that a layer learns, unless its source says otherwise."""


@final
@dataclass(frozen=True)
class Learned:
    r"""A linear map of the input, brought into the parameter's bounds; it starts at `initial` for every token.

    "> 0" and ">= 0" give $\mathrm{softplus}(Wx + b) + \epsilon$, "<= 0" gives $-\mathrm{softplus}(Wx + b)$, "[0, 1]"
    gives $\sigma(Wx + b)$, and an unbounded parameter $Wx + b$.

    Args:
        initial: where it starts.
        floor: ε, the smallest variance that it can reach. With 0 a variance may become as small as training makes it:
            far below one, softplus is an exponential, so its logarithm is learned.
    """

    initial: float
    floor: float = FLOOR

    def __post_init__(self) -> None:
        for name in ("initial", "floor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"Learned({name}): expected a finite number, got {value!r}")
        if self.floor < 0:
            raise ValueError(f"Learned(floor): expected at least 0, got {self.floor!r}")


@final
@dataclass(frozen=True)
class Gate:
    r"""A ratio of variances learned from the input as a gate, $\lambda_t/(\lambda_t + r_t^2) = \sigma(Wx + b)$.

    It starts at `initial` for every token. With unit keys the gate is the strength of a delta rule's write. It gives
    `prior_variance` λ next to r² = 1, or `write_noise` r² next to λ = 1.
    """

    initial: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.initial, (int, float)) or not 0 < self.initial < 1:
            raise ValueError(f"Gate(initial): expected a number between 0 and 1, got {self.initial!r}")


@final
@dataclass(frozen=True)
class Spectrum:
    r"""Decays and angles from one spectrum and a step size from the input, as state-space models have it.

    $$\log\rho_t = -\Delta_t e^{A_{\mathrm{radius}}}, \qquad \theta_t = \Delta_t A_{\mathrm{angle}}, \qquad
    \Delta_t = \mathrm{softplus}(W_A x_t + A_{\mathrm{step}})$$

    Args:
        decay: the step parameter that receives log ρ.
        angle: the step parameter that receives θ, or None.
    """

    decay: str
    angle: str | None = None


Source = Learned | Gate | Spectrum | float
"""Where a step parameter comes from: the input, or one number for every token."""
