r"""What a write observes: the memory itself, or only the coefficient that is being written.

This is the choice that separates the paper's two design models. `ObserveMemory` gives the Bayesian Layer and the
delta-rule family; `LatentInput` gives the additive family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from membydesign.design.equations import Equation


class Write(ABC):
    r"""What the written value $v_t$ tells about memory $S_t$ (D×M), given the write key $k_t$ (D)."""

    groups: int

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

    def __post_init__(self) -> None:
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise ValueError(f"ObserveMemory(groups): expected a whole number of at least 1, got {self.groups!r}")

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
