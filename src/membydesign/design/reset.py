r"""Covariances that keep nothing from one write to the next: the delta rule, Longhorn, and the additive family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.design.covariance import Covariance
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sequence_drift import Gains, SequenceDrift, squared_norm
from membydesign.design.sources import Gate

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design.protocol import Step
    from membydesign.design.sequence_drift import Drift
    from membydesign.design.write import Write, WriteEvent
    from membydesign.state import Sizes


class _NothingKept(Covariance):
    """What the three have in common."""

    predicts = False

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        """None: nothing is kept."""

    def condition(self, predicted: Tensor | None, event: WriteEvent, k: Tensor) -> None:
        """None: nothing is kept."""

    def passage(self, write: Write) -> None:
        """None: nothing is kept."""
        del write

    def elements(self, D: int, groups: int) -> int:
        """0: nothing is kept."""
        del D, groups
        return 0


class _IsotropicReset(_NothingKept):
    """A predicted covariance λ I, with one λ for all value columns or one for each."""

    def _prior_variance(self, parameter: Tensor) -> Tensor:
        """λ with an axis of value columns, [..., 1] or [..., M]."""
        raise NotImplementedError

    def predict(self, kept: None, drifted: Drift, step: Step) -> Tensor:
        """λ, [B,H,1] or [B,H,M]."""
        del kept, drifted
        return self._prior_variance(step["prior_variance"])

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        """λ k."""
        return predicted[..., None] * k[..., None, :]

    def along(self, predicted: Tensor, k: Tensor, warped_key: Tensor) -> Tensor:
        """λ ‖k‖²."""
        del warped_key
        return predicted * squared_norm(k)

    def variance(self, kept: None, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        r"""What the reset belief claims just after its write: $q^\top(\lambda I - \beta u u^\top)q$, [B,H,G]."""
        del kept
        assert noise is not None
        prior_variance = self._prior_variance(step["prior_variance"])
        precision = 1 / (noise + prior_variance * squared_norm(step.k))
        return reset_variance(prior_variance, precision, noise, q, step.k)

    def gains(self, kept: None, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        """Known in advance: d = k, γ = η = λ / (r² + λ‖k‖²)."""
        del kept
        prior_variance, noise = self._prior_variance(drift.parameters["prior_variance"]), drift.write_noise
        precision = 1 / (noise + prior_variance * drift.squared_norm(k))
        variance = None if q is None else reset_variance(prior_variance, precision, noise, q, k)
        return Gains(k[..., None, :], precision * prior_variance, precision, None, variance)


def reset_variance(prior_variance: Tensor, precision: Tensor, noise: Tensor, q: Tensor, k: Tensor) -> Tensor:
    r"""$q^\top(\lambda I - \beta u u^\top)q$ with $u = \lambda k$, [..., G].

    Where the write is surer than memory, $\lambda\lVert k\rVert^2 > r^2$, it is the sum of two positive terms:
    $\lambda$ still across the key, $\lambda r^2\beta$ along it. Elsewhere
    $\lambda(\lVert q\rVert^2 - \beta\lambda(q^\top k)^2)$ subtracts at most half, and does not divide by
    $\lVert k\rVert^2$, which would cost small keys their gradient.
    """
    norm, product = squared_norm(k), (q * k).sum(-1, keepdim=True)
    sure = prior_variance * norm > noise
    along = product / torch.where(sure.any(-1, keepdim=True), norm, 1.0)
    across = (q - along * k).square().sum(-1, keepdim=True)
    if k.shape[-1] == 1:  # nothing is across the key, and what rounding leaves may exceed the variance along it
        across = torch.zeros_like(across)
    split = across + along.square() * norm * noise * precision
    lowered = squared_norm(q) - precision * prior_variance * product.square()
    return prior_variance * torch.where(sure, split, lowered)


@final
@dataclass(frozen=True)
class Reset(_IsotropicReset):
    r"""The predicted covariance is replaced by $\lambda_t I$ at every step: the delta rule.

    $$\bar P_t := \lambda_t I \;\Rightarrow\; u_t = \lambda_t k_t, \qquad
    M_t = \bar M_t + \eta_t k_t (v_t - \bar M_t^\top k_t)^\top, \qquad
    \eta_t = \frac{\lambda_t}{r_t^2 + \lambda_t \lVert k_t\rVert^2}$$

    Nothing is remembered of earlier writes' certainty, so no covariance is kept. The variance of a read is what
    the reset belief claims just after its write, $q_t^\top(\lambda_t I - \beta_t u_t u_t^\top)q_t$.

    Step parameters: `prior_variance` $\lambda_t$ > 0, [B,T,H].
    """

    exactness = "covariance reset"
    step_parameters = (StepParameter("prior_variance", "λ_t", bound="> 0"),)
    parameter_sources = {"prior_variance": 1.0, "write_noise": Gate()}

    def _prior_variance(self, parameter: Tensor) -> Tensor:
        return parameter[..., None]

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


@final
@dataclass(frozen=True)
class PerColumnReset(_IsotropicReset):
    r"""The predicted covariance of value column j is replaced by $\lambda_{t,j} I$ at every step: Longhorn.

    $$\bar P_t^{(j)} := \lambda_{t,j} I \;\Rightarrow\;
    M_t^{(j)} = \bar M_t^{(j)} + \eta_{t,j} k_t (v_{t,j} - \hat v_{t,j}), \qquad
    \eta_{t,j} = \frac{\lambda_{t,j}}{r_t^2 + \lambda_{t,j} \lVert k_t\rVert^2}$$

    Every column is a noise group of its own, so variances come as [B,T,H,M].

    Step parameters: `prior_variance` $\lambda_{t,j}$ > 0, [B,T,H,M].
    """

    exactness = "per-column covariance reset"
    step_parameters = (StepParameter("prior_variance", "λ_t,j", axes=("M",), bound="> 0"),)
    parameter_sources = {"prior_variance": Gate(), "write_noise": 1.0}

    def _prior_variance(self, parameter: Tensor) -> Tensor:
        return parameter

    def gain_groups(self, groups: int, M: int) -> int:
        """M: every value column has a gain of its own."""
        del groups
        return M

    def refuse_write(self, write: Write) -> str | None:
        """Columns are groups already."""
        if write.groups == 1:
            return None
        return (
            f"PerColumnReset gives every value column a gain of its own, which {write!r} would group again; "
            f"use {type(write).__name__}()"
        )

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


@final
@dataclass(frozen=True)
class MeanOnly(_NothingKept):
    r"""No covariance is kept, because the mean never reads one: the additive family.

    Only for `LatentInput`, whose mean update $M_t = \bar M_t + \omega_t k_t v_t^\top$ is exact without it. Keep
    `Dense` instead to have the variance of a read as well.
    """

    exactness = "exact filter"
    has_gain = False
    has_variance = False

    def predict(self, kept: None, drifted: Drift, step: Step) -> None:
        """None: no covariance is predicted."""

    def times(self, predicted: None, k: Tensor) -> Tensor:
        """Undefined: `DesignModel` refuses the writes that would need it."""
        raise NotImplementedError("MeanOnly keeps no covariance")

    def variance(self, kept: None, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """Undefined: `DesignModel.has_variance` is False."""
        raise NotImplementedError("MeanOnly keeps no covariance")

    @property
    def equations(self) -> tuple[Equation, ...]:
        """None: there is no covariance to propagate."""
        return ()
