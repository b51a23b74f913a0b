r"""What a write observes: the memory itself, or only the coefficient that is being written.

This is the choice that separates the paper's two design models. `ObserveMemory` gives the Bayesian Layer and the
delta-rule family; `LatentInput` gives the additive family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

from membydesign.belief import gaussian_log_density
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Learned, Source
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design.covariance import Covariance
    from membydesign.design.protocol import Step


class Observation(NamedTuple):
    r"""A write as the Gaussian observation that it amounts to: `value` seen with variance `noise` at the key.

    Attributes:
        value: the observed value, [B,H,M]; usually v itself.
        noise: its variance r², [B,H,G].
        log_density: $\log p(v_t \mid v_{<t})$, [B,H].
    """

    value: Tensor
    noise: Tensor
    log_density: Tensor


class WriteEvent(NamedTuple):
    r"""What one write does to a Gaussian belief: $M = \bar M + \beta u e^\top$, $P = \bar P - \beta u u^\top$.

    A write that adds to memory along its key and observes only that leaves $P = \bar P + \rho k k^\top$ instead.

    Attributes:
        warped_key: $u = \mathrm{Cov}(S, v)$, where the write lands, [B,H,G,D].
        precision: $\beta = 1/\mathrm{Var}(v)$, the innovation precision, [B,H,G].
        error: $e = v - \hat v$, the innovation, [B,H,M].
        log_density: $\log p(v_t \mid v_{<t})$, [B,H].
        noise: $r^2$ of the observation that the write amounts to, [B,H,G]; None if it is not known, or `left` is given.
        left: $\rho$, the variance along the key that an additive write leaves, [B,H,G]; None for other writes.
    """

    warped_key: Tensor
    precision: Tensor
    error: Tensor
    log_density: Tensor
    noise: Tensor | None = None
    left: Tensor | None = None


class Write(ABC):
    r"""What the written value $v_t$ tells about memory $S_t$ (D×M), given the write key $k_t$ (D).

    A likelihood that depends on $S_t^\top k_t$ implements `observe`. A write of another kind overrides `event`.

    Attributes:
        step_parameters: the parameters of the likelihood.
        parameter_sources: where a layer takes them from; others follow their bounds.
        groups: G, how many groups of value columns have a noise of their own.
        observes_memory: whether $v_t$ depends on all of $S_t$; False if it observes only what this step adds, so that
            there is no error to correct and no process noise.
        exactness: "exact filter", or how conditioning on the write is approximated.
    """

    step_parameters: ClassVar[tuple[StepParameter, ...]] = ()
    parameter_sources: ClassVar[Mapping[str, Source]] = {}
    groups: int = 1
    observes_memory: ClassVar[bool] = True
    exactness: ClassVar[str] = "exact filter"

    @abstractmethod
    def observe(self, mean: Tensor, variance: Tensor, v: Tensor, step: Step) -> Observation:
        r"""The Gaussian observation that the write amounts to.

        Args:
            mean: what memory predicts at the key, $\bar M_t^\top k_t$, [B,H,M].
            variance: how unsure it is, $k_t^\top \bar P_t k_t$, [B,H,G].
            v: the written value, [B,H,M].
            step: the parameters of the token.
        """

    def event(self, mean: Tensor, predicted: Any, covariance: Covariance, v: Tensor, step: Step) -> WriteEvent:
        r"""What the write does to the belief.

        Args:
            mean: the predicted mean $\bar M_t$, [B,H,D,M].
            predicted: the predicted covariance, as `covariance.predict` returned it.
            covariance: knows what `predicted` means.
            v: the written value, [B,H,M].
            step: the parameters of the token; `step.k` is its key.
        """
        k = step.k
        expected = product(k[..., None, :], mean)[..., 0, :]
        warped_key = covariance.times(predicted, k)
        variance = covariance.along(predicted, k, warped_key)
        value, noise, log_density = self.observe(expected, variance, v, step)
        precision = 1 / (noise + variance)
        warped_key = warped_key.expand(*precision.shape, -1)
        return WriteEvent(warped_key, precision, value - expected, log_density, noise=noise)

    def noise(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        r"""$r^2$ of $v_t \mid S_t \sim \mathcal N(S_t^\top k_t, r_t^2 I)$, [..., G], from step parameters alone.

        The chunked kernels need it. None (the default) says that the write has another likelihood, or that its noise
        depends on values; then the loop over tokens runs it.
        """
        del parameters
        return None

    def why_not_affine(self) -> str | None:
        """Why the mean after a write is not an affine function of the mean before it; None if it is.

        It is one where `noise` gives r² from parameters alone. The reason follows "for Title, ".
        """
        if type(self).noise is Write.noise:
            return f"since the noise of {type(self).__name__} may depend on what memory holds"
        return None

    def with_groups(self, groups: int) -> Write | None:
        """The same write with another number of noise groups; None if it has one for all columns."""
        del groups
        return None

    @property
    @abstractmethod
    def density(self) -> tuple[Equation, ...]:
        """The densities that define the write."""

    @property
    @abstractmethod
    def update(self) -> tuple[Equation, ...]:
        r"""The mean update that conditioning on $v_t$ gives, with the predicted mean $\bar M_t = A_t M_{t-1}$."""


@final
@dataclass(frozen=True)
class ObserveMemory(Write):
    r"""A write observes the memory along its key: $v_t \mid S_t \sim \mathcal N(S_t^\top k_t,\ r_t^2 I)$.

    Conditioning on $v_t$ corrects the error of what memory predicts there,

    $$u_t = \bar P_t k_t,\quad \beta_t = (r_t^2 + k_t^\top u_t)^{-1},\quad
    M_t = \bar M_t + \beta_t u_t (v_t - \bar M_t^\top k_t)^\top .$$

    Args:
        groups: G, how many groups of value columns have a write noise of their own. The M columns are split into G
            runs of M/G; each group has its own covariance and gain. G=1 shares one among all columns, G=M gives
            every column its own.

    Step parameters: `write_noise` $r_t^2$ > 0, [B,T,H] or [B,T,H,G].
    """

    groups: int = 1
    step_parameters = (StepParameter("write_noise", "r_t²", axes=("G",), optional_axes=True, bound="> 0"),)
    parameter_sources = {"write_noise": Learned(0.5)}

    def __post_init__(self) -> None:
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise ValueError(f"ObserveMemory(groups): expected a whole number of at least 1, got {self.groups!r}")

    def observe(self, mean: Tensor, variance: Tensor, v: Tensor, step: Step) -> Observation:
        """The value itself, with its own noise."""
        noise = step["write_noise"]
        return Observation(v, noise, gaussian_log_density(v - mean, 1 / (noise + variance)))

    def noise(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """r², [..., G]."""
        return parameters["write_noise"]

    def with_groups(self, groups: int) -> ObserveMemory:
        """ObserveMemory(groups)."""
        return ObserveMemory(groups=groups)

    @property
    def density(self) -> tuple[Equation, ...]:
        """v_t | S_t ~ N(S_tᵀ k_t, r_t² I), with one r² per group."""
        if self.groups == 1:
            return (
                Equation(
                    "v_t | S_t ~ N(S_tᵀ k_t, r_t² I)",
                    r"\mathbf{v}_t \mid \mathbf{S}_t \sim "
                    r"\mathcal{N}(\mathbf{S}_t^\top \mathbf{k}_t,\ r_t^2 \mathbf{I})",
                ),
            )
        return (
            Equation(
                f"v_t | S_t ~ N(S_tᵀ k_t, diag(r²_t,1 I, …, r²_t,{self.groups} I))",
                r"\mathbf{v}_t \mid \mathbf{S}_t \sim \mathcal{N}(\mathbf{S}_t^\top \mathbf{k}_t,\ "
                rf"\mathrm{{diag}}(r_{{t,1}}^2 \mathbf{{I}}, \ldots, r_{{t,{self.groups}}}^2 \mathbf{{I}}))",
            ),
        )

    @property
    def update(self) -> tuple[Equation, ...]:
        """u = P̄k, β = 1/(r² + kᵀu), M = M̄ + βu(v − M̄ᵀk)ᵀ."""
        return (
            Equation("u_t = P̄_t k_t", r"\mathbf{u}_t = \bar{\mathbf{P}}_t \mathbf{k}_t"),
            Equation(
                "β_t = 1 / (r_t² + k_tᵀ u_t)",
                r"\beta_t = (r_t^2 + \mathbf{k}_t^\top \mathbf{u}_t)^{-1}",
            ),
            Equation(
                "M_t = M̄_t + β_t u_t (v_t − M̄_tᵀ k_t)ᵀ",
                r"\mathbf{M}_t = \bar{\mathbf{M}}_t + \beta_t \mathbf{u}_t "
                r"(\mathbf{v}_t - \bar{\mathbf{M}}_t^\top \mathbf{k}_t)^\top",
            ),
        )


@final
@dataclass(frozen=True)
class LatentInput(Write):
    r"""A write observes only the coefficient that is being written.

    $$\phi_t \sim \mathcal N(0, \lambda_t I),\qquad S_t = A_t S_{t-1} + k_t \phi_t^\top,\qquad
    v_t \mid \phi_t \sim \mathcal N(\phi_t,\ r_t^2 I)$$

    Conditioning never asks what memory already holds, so the update is additive:
    $M_t = \bar M_t + \omega_t k_t v_t^\top$ with the trust $\omega_t = \lambda_t/(\lambda_t + r_t^2)$. There is no
    process noise in this model. The noiseless write, $r_t^2 = 0$, has $\omega_t = 1$: plain linear attention.

    Step parameters: `prior_variance` $\lambda_t$ > 0, [B,T,H]; `write_noise` $r_t^2$ ≥ 0, [B,T,H].
    """

    groups = 1
    observes_memory = False
    step_parameters = (
        StepParameter("prior_variance", "λ_t", bound="> 0"),
        StepParameter("write_noise", "r_t²", bound=">= 0"),
    )
    parameter_sources = {"prior_variance": 1.0, "write_noise": 0.0}

    def observe(self, mean: Tensor, variance: Tensor, v: Tensor, step: Step) -> Observation:
        """The coefficient is predicted to be zero, with variance λ, whatever memory holds."""
        del mean, variance
        prior_variance, noise = step["prior_variance"][..., None], step["write_noise"][..., None]
        return Observation(v, noise, gaussian_log_density(v, 1 / (prior_variance + noise)))

    def event(self, mean: Tensor, predicted: Any, covariance: Covariance, v: Tensor, step: Step) -> WriteEvent:
        """The coefficient enters memory along the key with variance λ, and is observed there."""
        del covariance
        prior_variance = step["prior_variance"][..., None]
        value, noise, log_density = self.observe(mean, predicted, v, step)
        warped_key = prior_variance[..., None] * step.k[..., None, :]
        precision = 1 / (prior_variance + noise)
        left = prior_variance * precision * noise  # λ − βλ² without its cancellation where r² is small
        return WriteEvent(warped_key, precision, value, log_density, left=left)

    def noise(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """r², [..., 1]."""
        return parameters["write_noise"][..., None]

    @property
    def density(self) -> tuple[Equation, ...]:
        """φ_t ~ N(0, λ_t I), S_t = A_t S_{t-1} + k_t φ_tᵀ, v_t | φ_t ~ N(φ_t, r_t² I)."""
        return (
            Equation("φ_t ~ N(0, λ_t I)", r"\boldsymbol{\phi}_t \sim \mathcal{N}(\mathbf{0},\ \lambda_t \mathbf{I})"),
            Equation(
                "S_t = A_t S_{t-1} + k_t φ_tᵀ",
                r"\mathbf{S}_t = \mathbf{A}_t \mathbf{S}_{t-1} + \mathbf{k}_t \boldsymbol{\phi}_t^\top",
            ),
            Equation(
                "v_t | φ_t ~ N(φ_t, r_t² I)",
                r"\mathbf{v}_t \mid \boldsymbol{\phi}_t \sim \mathcal{N}(\boldsymbol{\phi}_t,\ r_t^2 \mathbf{I})",
            ),
        )

    @property
    def update(self) -> tuple[Equation, ...]:
        """ω = λ/(λ + r²), M = M̄ + ω k vᵀ."""
        return (
            Equation("ω_t = λ_t / (λ_t + r_t²)", r"\omega_t = \lambda_t / (\lambda_t + r_t^2)"),
            Equation(
                "M_t = M̄_t + ω_t k_t v_tᵀ",
                r"\mathbf{M}_t = \bar{\mathbf{M}}_t + \omega_t \mathbf{k}_t \mathbf{v}_t^\top",
            ),
        )
