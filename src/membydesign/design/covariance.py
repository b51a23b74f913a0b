r"""What the belief remembers of its own uncertainty, from one write to the next.

The mean update reads the predicted covariance $\bar P_t$ through the warped key $u_t = \bar P_t k_t$. Keeping
$\bar P_t$ whole makes the filter exact; the other classes say what is thrown away instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from membydesign.design.equations import Equation

_PREDICTED = Equation(
    "P̄_t = A_t P_{t-1} A_tᵀ + ℓ_t² N",
    r"\bar{\mathbf{P}}_t = \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top + \ell_t^2 \mathbf{N}",
)


class Covariance(ABC):
    """What is kept of the covariance between two tokens."""

    exactness: ClassVar[str]
    """How the resulting filter relates to the exact one."""

    @property
    @abstractmethod
    def equations(self) -> tuple[Equation, ...]:
        """How the predicted covariance is formed, and what is kept of the posterior one."""

    @abstractmethod
    def elements(self, D: int, groups: int) -> int:
        """Numbers kept per head, for keys of size D and `groups` noise groups."""


def _check_prior(name: str, prior: float) -> None:
    if isinstance(prior, bool) or not isinstance(prior, (int, float)) or not math.isfinite(prior) or prior < 0:
        raise ValueError(f"{name}(prior): expected a finite variance of at least 0, got {prior!r}")


@final
@dataclass(frozen=True)
class Dense(Covariance):
    r"""The whole D×D covariance is propagated: the exact filter.

    $$\bar P_t = A_t P_{t-1} A_t^\top + \ell_t^2 N, \qquad P_t = \bar P_t - \beta_t u_t u_t^\top, \qquad P_0 = p_0 I$$

    Under `LatentInput` the mean never reads the covariance; Dense then keeps the exact
    $P_t = A_t P_{t-1} A_t^\top + \omega_t r_t^2\, k_t k_t^\top$, for those who want the variance of a read.

    Args:
        prior: $p_0$, the variance of every direction before anything is written.

    Step parameters: `process_noise` $\ell_t^2$ ≥ 0, [B,T,H] (none under `LatentInput`).
    State: G·D² elements, [B,H,G,D,D].
    """

    prior: float = 1.0
    exactness = "exact filter"

    def __post_init__(self) -> None:
        _check_prior("Dense", self.prior)

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄ = A P Aᵀ + ℓ²N, P = P̄ − βuuᵀ."""
        return (
            _PREDICTED,
            Equation(
                "P_t = P̄_t − β_t u_t u_tᵀ",
                r"\mathbf{P}_t = \bar{\mathbf{P}}_t - \beta_t \mathbf{u}_t \mathbf{u}_t^\top",
            ),
        )

    def elements(self, D: int, groups: int) -> int:
        """G·D²."""
        return groups * D * D


@final
@dataclass(frozen=True)
class Diagonal(Covariance):
    r"""Only the diagonal survives each update; correlations between key dimensions are discarded.

    $$\bar P_t = A_t P_{t-1} A_t^\top + \ell_t^2 N, \qquad
    P_t = \mathrm{diag}\bigl(\mathrm{diag}(\bar P_t - \beta_t u_t u_t^\top)\bigr), \qquad P_0 = p_0 I$$

    Args:
        prior: $p_0$, the variance of every direction before anything is written.

    Step parameters: `process_noise` $\ell_t^2$ ≥ 0, [B,T,H].
    State: G·D elements, [B,H,G,D].
    """

    prior: float = 1.0
    exactness = "diagonal truncation"

    def __post_init__(self) -> None:
        _check_prior("Diagonal", self.prior)

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄ = A P Aᵀ + ℓ²N, P = diag(P̄ − βuuᵀ)."""
        return (
            _PREDICTED,
            Equation(
                "P_t = the diagonal of P̄_t − β_t u_t u_tᵀ",
                r"\mathbf{P}_t = \mathrm{diag}(\mathrm{diag}("
                r"\bar{\mathbf{P}}_t - \beta_t \mathbf{u}_t \mathbf{u}_t^\top))",
            ),
        )

    def elements(self, D: int, groups: int) -> int:
        """G·D."""
        return groups * D


@final
@dataclass(frozen=True)
class Reset(Covariance):
    r"""The predicted covariance is replaced by $\lambda_t I$ at every step: the delta rule.

    $$\bar P_t := \lambda_t I \;\Rightarrow\; u_t = \lambda_t k_t, \qquad
    M_t = \bar M_t + \eta_t k_t (v_t - \bar M_t^\top k_t)^\top, \qquad
    \eta_t = \frac{\lambda_t}{r_t^2 + \lambda_t \lVert k_t\rVert^2}$$

    Nothing is remembered of earlier writes' certainty, so no covariance is kept. The variance of a read is what
    the reset belief claims just after its write, $q_t^\top(\lambda_t I - \beta_t u_t u_t^\top)q_t$.

    Step parameters: `prior_variance` $\lambda_t$ > 0, [B,T,H].
    """

    exactness = "covariance reset"

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄ := λI, so that M = M̄ + ηk(v − M̄ᵀk)ᵀ with η = λ/(r² + λ‖k‖²)."""
        return (
            Equation(
                "P̄_t := λ_t I   in place of A_t P_{t-1} A_tᵀ + ℓ_t² N", r"\bar{\mathbf{P}}_t := \lambda_t \mathbf{I}"
            ),
            Equation(
                "⇒ M_t = M̄_t + η_t k_t (v_t − M̄_tᵀ k_t)ᵀ,  η_t = λ_t / (r_t² + λ_t ‖k_t‖²)",
                r"\Rightarrow\ \mathbf{M}_t = \bar{\mathbf{M}}_t + \eta_t \mathbf{k}_t "
                r"(\mathbf{v}_t - \bar{\mathbf{M}}_t^\top \mathbf{k}_t)^\top,"
                r"\quad \eta_t = \lambda_t / (r_t^2 + \lambda_t \Vert \mathbf{k}_t \Vert^2)",
            ),
        )

    def elements(self, D: int, groups: int) -> int:
        """0: nothing is kept."""
        del D, groups
        return 0


@final
@dataclass(frozen=True)
class PerColumnReset(Covariance):
    r"""The predicted covariance of value column j is replaced by $\lambda_{t,j} I$ at every step: Longhorn.

    $$\bar P_t^{(j)} := \lambda_{t,j} I \;\Rightarrow\;
    M_t^{(j)} = \bar M_t^{(j)} + \eta_{t,j} k_t (v_{t,j} - \hat v_{t,j}), \qquad
    \eta_{t,j} = \frac{\lambda_{t,j}}{r_t^2 + \lambda_{t,j} \lVert k_t\rVert^2}$$

    Every column is a noise group of its own, so variances come as [B,T,H,M].

    Step parameters: `prior_variance` $\lambda_{t,j}$ > 0, [B,T,H,M].
    """

    exactness = "per-column covariance reset"

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄⁽ʲ⁾ := λⱼI, so that M⁽ʲ⁾ = M̄⁽ʲ⁾ + ηⱼk(vⱼ − v̂ⱼ) with ηⱼ = λⱼ/(r² + λⱼ‖k‖²)."""
        return (
            Equation(
                "P̄_t⁽ʲ⁾ := λ_t,j I   for every value column j",
                r"\bar{\mathbf{P}}_t^{(j)} := \lambda_{t,j} \mathbf{I} \quad (j = 1, \ldots, M)",
            ),
            Equation(
                "⇒ M_t⁽ʲ⁾ = M̄_t⁽ʲ⁾ + η_t,j k_t (v_t,j − v̂_t,j),  η_t,j = λ_t,j / (r_t² + λ_t,j ‖k_t‖²)",
                r"\Rightarrow\ \mathbf{M}_t^{(j)} = \bar{\mathbf{M}}_t^{(j)} "
                r"+ \eta_{t,j} \mathbf{k}_t (v_{t,j} - \hat{v}_{t,j}),"
                r"\quad \eta_{t,j} = \lambda_{t,j} / (r_t^2 + \lambda_{t,j} \Vert \mathbf{k}_t \Vert^2)",
            ),
        )

    def elements(self, D: int, groups: int) -> int:
        """0: nothing is kept."""
        del D, groups
        return 0


@final
@dataclass(frozen=True)
class MeanOnly(Covariance):
    r"""No covariance is kept, because the mean never reads one: the additive family.

    Only for `LatentInput`, whose mean update $M_t = \bar M_t + \omega_t k_t v_t^\top$ is exact without it. Keep
    `Dense` instead to have the variance of a read as well.
    """

    exactness = "exact filter"

    @property
    def equations(self) -> tuple[Equation, ...]:
        """None: there is no covariance to propagate."""
        return ()

    def elements(self, D: int, groups: int) -> int:
        """0: nothing is kept."""
        del D, groups
        return 0
