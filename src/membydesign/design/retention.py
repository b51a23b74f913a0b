r"""Covariances that drift in a way of their own: part of the certainty is forgotten at every step, the mean is not.

The mean drifts with the transition, $\bar M_t = A_t M_{t-1}$. The covariance forgets besides: `PartialReset` returns
part of it to a prior, `Discounted` inflates it. Each is the Kalman filter of a memory with the process noise
$\bar P_t - A_t P_{t-1} A_t^\top$ that this amounts to, so conditioning stays exact.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from membydesign.design.covariance import Covariance, WholeMatrix
from membydesign.design.passage import CovarianceMap
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Gate, Learned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design.protocol import Step
    from membydesign.design.sequence_drift import Drift
    from membydesign.design.write import Write


class Forgetting(NamedTuple):
    r"""How a covariance drifts: $\bar P_t = s_t A_t P_{t-1} A_t^\top + \lambda_t (I - s_t A_t A_t^\top)$.

    Attributes:
        scale: s, at least 0, [...].
        prior_variance: λ, [...]; None for λ = 0.
    """

    scale: Tensor
    prior_variance: Tensor | None = None


class ForgettingCovariance(WholeMatrix):
    """A whole covariance that drifts as `forgetting` says, given what the transition does.

    The gains of a sequence are computed in chunks where the transition is a drift of rows.
    """

    predicts = False

    @abstractmethod
    def forgetting(self, parameters: Mapping[str, Tensor]) -> Forgetting:
        """How the covariance drifts, from the step parameters by name: of one token, or of all tokens of a sequence."""

    def predict(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """S A P Aᵀ + λ(I − s A Aᵀ)."""
        scale, prior_variance = self.forgetting(step)
        scale = scale[..., None, None, None]
        predicted = scale * drifted(kept)
        if prior_variance is None:
            return predicted
        identity = torch.eye(kept.shape[-1], dtype=kept.dtype, device=kept.device)
        faded = scale * drifted(identity.expand(*kept.shape[:2], 1, *identity.shape))
        return predicted + prior_variance[..., None, None, None] * (identity - faded)

    def implied_noise(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """P̄ − A P Aᵀ: the process noise of the memory whose Kalman filter this is."""
        return self.predict(kept, drifted, step) - drifted(kept)

    gains = Covariance.gains_by_token

    def passage(self, write: Write) -> CovarianceMap:
        """The map of a memory that drifts by √s A."""
        del write
        return CovarianceMap(lambda parameters: self.forgetting(parameters).scale)

    def refuse_write(self, write: Write) -> str | None:
        """A write must read the covariance."""
        if write.observes_memory:
            return None
        return (
            f"{type(write).__name__}'s mean never reads a covariance, so there is nothing for {type(self).__name__} to "
            "forget; use MeanOnly() to keep none, or Dense() to keep the exact one for the variance of a read"
        )


@final
@dataclass(frozen=True)
class PartialReset(ForgettingCovariance):
    r"""Part of the covariance returns to λI at every step: a dial from the delta rule to the Bayesian Layer.

    $$\bar P_t = \gamma_t A_t P_{t-1} A_t^\top + \lambda_t (I - \gamma_t A_t A_t^\top), \qquad
    \bar M_t = A_t M_{t-1}, \qquad P_t = \bar P_t - \beta_t u_t u_t^\top, \qquad P_0 = p_0 I$$

    With retention $\gamma_t = 0$ every write meets the covariance $\lambda_t I$: the delta rule, as `Reset` has it.
    With $\gamma_t = 1$ the certainty of a write fades only as memory does: the Bayesian Layer with the stationary
    process noise $\lambda_t (I - A_t A_t^\top)$. Between them the certainty of earlier writes counts for about
    $1/(1 - \gamma)$ tokens. Where nothing was written the variance is $\lambda$, however long the sequence.

    The implied process noise $\bar P_t - A_t P_{t-1} A_t^\top \succeq \lambda_t(I - A_t A_t^\top)$ is a covariance
    where $P_{t-1} \preceq \lambda_t I$, which a constant $\lambda \ge p_0$ ensures; a λ that falls below what memory is
    unsure of makes it surer than any write did. No transition may amplify: decays and rotations do not.

    Args:
        prior: $p_0$, the variance of every direction before anything is written; best the λ of the first tokens.

    Step parameters: `retention` $\gamma_t \in [0, 1]$, [B,T,H]; `prior_variance` $\lambda_t$ > 0, [B,T,H].
    State: G·D² elements, [B,H,G,D,D].
    """

    step_parameters = (
        StepParameter("retention", "γ_t", bound="[0, 1]", idle=1.0),
        StepParameter("prior_variance", "λ_t", bound="> 0"),
    )
    parameter_sources = {"retention": Learned(0.95), "prior_variance": 1.0, "write_noise": Gate()}

    @property
    def predicted(self) -> Equation:
        """P̄ = γ A P Aᵀ + λ(I − γ A Aᵀ)."""
        return Equation(
            "P̄_t = γ_t A_t P_{t-1} A_tᵀ + λ_t (I − γ_t A_t A_tᵀ)",
            r"\bar{\mathbf{P}}_t = \gamma_t \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top "
            r"+ \lambda_t (\mathbf{I} - \gamma_t \mathbf{A}_t \mathbf{A}_t^\top)",
        )

    def forgetting(self, parameters: Mapping[str, Tensor]) -> Forgetting:
        """γ, and λ."""
        return Forgetting(parameters["retention"], parameters["prior_variance"])


@final
@dataclass(frozen=True)
class Discounted(ForgettingCovariance):
    r"""The covariance is inflated at every step: recursive least squares with forgetting.

    $$\bar P_t = \delta_t^{-1} A_t P_{t-1} A_t^\top, \qquad P_t = \bar P_t - \beta_t u_t u_t^\top, \qquad P_0 = p_0 I$$

    With $A_t = I$ the mean solves a weighted, regularised least-squares problem: a write at σ has the weight
    $r_\sigma^{-2} \delta_{\sigma+1} \cdots \delta_t$, and the prior $p_0^{-1}$ is discounted in the same way.

    Directions that are not written grow by 1/δ at every token without bound. A filter whose variances overflow raises
    `NonFiniteError`; `PartialReset` forgets without this.

    Args:
        prior: $p_0$, the variance of every direction before anything is written.

    Step parameters: `log_discount` $\log \delta_t$ ≤ 0, [B,T,H].
    State: G·D² elements, [B,H,G,D,D].
    """

    step_parameters = (StepParameter("log_discount", "log δ_t", bound="<= 0"),)
    parameter_sources = {"log_discount": Learned(-0.01)}

    @property
    def predicted(self) -> Equation:
        """P̄ = A P Aᵀ / δ."""
        return Equation(
            "P̄_t = A_t P_{t-1} A_tᵀ / δ_t",
            r"\bar{\mathbf{P}}_t = \delta_t^{-1} \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top",
        )

    def forgetting(self, parameters: Mapping[str, Tensor]) -> Forgetting:
        """1/δ, and no prior to return to."""
        return Forgetting((-parameters["log_discount"]).exp())
