r"""Regressions that are solved at every read: sums of keys and values, and a ridge.

    H_t = γ_t H_{t-1} + k_t k_tᵀ / r_t²          what keys have been written, D×D
    U_t = γ_t U_{t-1} + k_t v_tᵀ / r_t²          what was written with them, D×M
    M_t = (H_t + Λ_t)⁻¹ U_t,   P_t = (H_t + Λ_t)⁻¹            the belief that they stand for
    y_t = M_tᵀ q_t,   variance q_tᵀ P_t q_t

This is the information form of a Gaussian belief. Where it is exact, it equals the Kalman filter that keeps M and P; it
spends a solve for each read, and in turn fades without a covariance: old evidence counts γ less and the prior Λ stays.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from membydesign.belief import gaussian_log_density
from membydesign.design.passage import FadingSums
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Learned, Spectrum
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design.passage import Passage
    from membydesign.design.protocol import Step
    from membydesign.design.sources import Source
    from membydesign.state import Sizes

LOST = -1.0
"""The precision that says that a matrix was not positive definite."""

_WRITE = (
    Equation(
        "H_t = γ_t H_{t-1} + k_t k_tᵀ / r_t²",
        r"\mathbf{H}_t = \gamma_t \mathbf{H}_{t-1} + r_t^{-2}\, \mathbf{k}_t \mathbf{k}_t^\top",
    ),
    Equation(
        "U_t = γ_t U_{t-1} + k_t v_tᵀ / r_t²",
        r"\mathbf{U}_t = \gamma_t \mathbf{U}_{t-1} + r_t^{-2}\, \mathbf{k}_t \mathbf{v}_t^\top",
    ),
)
_DENSITY = Equation(
    "v_t | S ~ N(Sᵀ k_t, r_t² I)",
    r"\mathbf{v}_t \mid \mathbf{S} \sim \mathcal{N}(\mathbf{S}^\top \mathbf{k}_t,\ r_t^2 \mathbf{I})",
)
_FADES = Equation(
    "a write of s tokens ago counts γ_t γ_{t-1} … γ_{t-s+1}",
    r"\text{a write of } s \text{ tokens ago counts } \gamma_t \gamma_{t-1} \cdots \gamma_{t-s+1}",
)


class Statistics(NamedTuple):
    """The sums that a regression needs.

    Attributes:
        keys: H = Σ k kᵀ/r², faded, [B,H,D,D].
        values: U = Σ k vᵀ/r², faded, [B,H,D,M].
    """

    keys: Tensor
    values: Tensor


class RidgeDesign(Design):
    r"""A memory that keeps sums and solves $(H_t + \Lambda_t)\, x = q_t$ at each read.

    Derive from it and say what $\Lambda_t$ is (`ridge`); `mixed` may change what reads the values.

    Step parameters: `log_decay` log γ [B,T,H], at most 0; `write_noise` r² > 0, [B,T,H].
    """

    step_parameters = (
        StepParameter("log_decay", "log γ_t", bound="<= 0"),
        StepParameter("write_noise", "r_t²", bound="> 0"),
    )
    has_variance = True

    @abstractmethod
    def ridge(self, keys: Tensor, step: Step) -> Tensor:
        """The diagonal of Λ_t, [B,H,D] or [B,H,1], from the sums H_t that include the token's key."""

    def mixed(self, x: Tensor, q: Tensor, step: Step) -> Tensor:
        """What reads U_t, [B,H,D], given the solution x of (H + Λ) x = q: x itself."""
        del q, step
        return x

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Statistics:
        """Nothing has been written: zeros."""
        keys = torch.zeros(*sizes[:3], sizes.D, dtype=dtype, device=device)
        return Statistics(keys, torch.zeros(sizes, dtype=dtype, device=device))

    def predict(self, state: Statistics, step: Step) -> Statistics:
        """H ← γH, U ← γU."""
        kept = step["log_decay"].exp()[..., None, None]
        return Statistics(kept * state.keys, kept * state.values)

    def condition(self, state: Statistics, k: Tensor, v: Tensor, step: Step) -> Written:
        """H ← H + k kᵀ/r², U ← U + k vᵀ/r²."""
        noise = step["write_noise"][..., None]
        weighted = (k / noise)[..., None]
        after = Statistics(state.keys + weighted * k[..., None, :], state.values + weighted * v[..., None, :])
        solved, found = ridge_solved(state.keys, self.ridge(after.keys, step), k)
        precision = (1 / (noise + (k * solved).sum(-1, keepdim=True))).to(v.dtype)
        error = v - product(solved[..., None, :], state.values.to(solved.dtype))[..., 0, :].to(v.dtype)
        evidence = gaussian_log_density(error, precision)
        return Written(after, evidence, torch.where(found[..., None], precision, LOST))

    def read(self, state: Statistics, q: Tensor, step: Step) -> Reading:
        """Uᵀ x with (H + Λ) x = q, and qᵀx."""
        x, _ = ridge_solved(state.keys, self.ridge(state.keys, step), q)
        mean = product(self.mixed(x, q.to(x.dtype), step)[..., None, :], state.values.to(x.dtype))[..., 0, :]
        return Reading(mean.to(q.dtype), (q * x).sum(-1, keepdim=True).clamp_min(0).to(q.dtype))

    def passages(self) -> tuple[Passage, ...]:
        """Sums that fade by γ."""
        return (FadingSums(lambda parameters: parameters["log_decay"].exp()),)

    def observation_noise(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """r², [..., 1]."""
        return parameters["write_noise"][..., None]

    def state_flaws(self, state: Statistics, *, thorough: bool) -> list[Flaw]:
        """Sums of keys that no keys have."""
        keys, eps = state.keys, torch.finfo(state.keys.dtype).eps
        diagonal = keys.diagonal(dim1=-2, dim2=-1)
        scale = diagonal.abs().amax(-1).clamp_min(torch.finfo(keys.dtype).tiny)[..., None, None]
        rounding = 8 * max(keys.shape[-1], 8) * eps
        lost = diagonal.amin(-1) < -rounding * scale[..., 0, 0]
        if thorough:
            eye = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
            lost = torch.linalg.cholesky_ex((keys + keys.mT) / (2 * scale) + rounding * eye).info != 0
        return [
            Flaw(
                "keys",
                "positive semi-definite matrices",
                lost,
                lambda index: f"a negative eigenvalue at index {index}",
                NotPositiveDefiniteError,
            )
        ]

    def sources(self) -> Mapping[str, Source]:
        """Decays from a spectrum: heads start with memories of 10 to 1,000 tokens."""
        return {"log_decay": Spectrum("log_decay"), "write_noise": Learned(0.5)}

    def state_size(self, D: int, M: int) -> StateSize:
        """U and H."""
        return StateSize(mean=D * M, covariance=D * D)

    def state_formula(self) -> str:
        """U and H."""
        return "D·M + D²"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Decay and write of both sums, the read, and two Cholesky solves, one for the density of the write."""
        return "D³ + D·M", 4 * D * M + 2 * D * D + 2 * (D**3 // 6 + D * D)


def ridge_solved(keys: Tensor, ridge: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The solution x of (H + Λ) x = q, [B,H,D], in float64, and whether H + Λ is positive definite, [B,H].

    Directions that were never written have the largest part of x, and nothing of them is read: their share must cancel,
    also where the sums are in float32.

    Args:
        keys: H, [B,H,D,D].
        ridge: the diagonal of Λ, [B,H,D] or [B,H,1].
        q: [B,H,D].
    """
    keys, ridge, q = (x.to(torch.float64) for x in (keys, ridge, q))
    matrix = (keys + keys.mT) / 2 + torch.diag_embed(ridge.expand(q.shape))
    factor, info = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_solve(q[..., None], factor)[..., 0], info == 0


@final
@dataclass(frozen=True)
class MesaMemory(RidgeDesign):
    r"""MesaNet: the optimal linear regression of all values on their keys, at every token.

    $$M_t = \arg\min_S\ \sum_{s \le t} \frac{\gamma_t \cdots \gamma_{s+1}}{r_s^2} \| v_s - S^\top k_s \|^2
    + \mathrm{tr}\, S^\top \Lambda_t S, \qquad \Lambda_t = \mathrm{diag}(\lambda_t)^{-1}$$

    In the paper's letters $\beta_t = 1/r_t^2$ and $\Lambda$ is constant in time. Then this is the exact posterior of a
    memory with prior $N(0, \mathrm{diag}(\lambda))$ whose old evidence is tempered by γ; without fading, γ = 1, it is
    the Kalman filter of a memory that does not drift: `DesignModel(Identity(), ObserveMemory(), Dense(prior=λ))` with
    process noise 0. Fading tends to the prior and never beyond it, so the variance of a read is bounded by
    $q^\top \mathrm{diag}(\lambda)\, q$. If λ changes from token to token, every read has its own prior.

    The solve is exact (Cholesky), as the paper defines it; the paper's kernels run up to 30 steps of conjugate
    gradients.

    Step parameters: `log_decay` log γ [B,T,H], at most 0; `write_noise` r² > 0, [B,T,H]; `prior_variance` λ > 0,
    [B,T,H] or [B,T,H,D].
    """

    title = "MesaNet"
    citation = (
        "von Oswald, Scherrer, Kobayashi, Versari, Yang, Schlegel, Maile, Schimpf, Sieberling, Meulemans, Saurous, "
        "Lajoie, Frenkel, Pascanu, Agüera y Arcas & Sacramento, MesaNet: Sequence Modeling by Locally Optimal "
        "Test-Time Training, arXiv:2506.05233, 2025"
    )
    note = (
        "exact for a λ_t that is constant in time, with old evidence tempered by γ_t; without fading it is the Kalman "
        "filter of a memory that does not drift"
    )
    exactness = "exact filter"
    step_parameters = (
        *RidgeDesign.step_parameters,
        StepParameter("prior_variance", "λ_t", axes=("D",), optional_axes=True, bound="> 0"),
    )

    def ridge(self, keys: Tensor, step: Step) -> Tensor:
        """1/λ, [B,H,D]."""
        del keys
        return 1 / step["prior_variance"]

    def sources(self) -> Mapping[str, Source]:
        """A prior variance of 1, which goes with keys of length one."""
        return {**super().sources(), "prior_variance": 1.0}

    def assumptions(self) -> Assumptions:
        """Evidence that fades, and its sums."""
        return Assumptions("FadingEvidence", "ObserveMemory", "Statistics")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Prior, likelihood, sums and solve."""
        return (
            (
                "assume",
                (
                    Equation(
                        "S ~ N(0, diag(λ_t))", r"\mathbf{S} \sim \mathcal{N}(\mathbf{0}, \mathrm{diag}(\lambda_t))"
                    ),
                ),
            ),
            ("a write observes", (_DENSITY, _FADES)),
            ("write", _WRITE),
            (
                "read",
                (
                    Equation(
                        "y_t = U_tᵀ (H_t + diag(λ_t)⁻¹)⁻¹ q_t",
                        r"\mathbf{y}_t = \mathbf{U}_t^\top "
                        r"(\mathbf{H}_t + \mathrm{diag}(\lambda_t)^{-1})^{-1} \mathbf{q}_t",
                    ),
                ),
            ),
        )


@final
@dataclass(frozen=True)
class KalmaNetMemory(RidgeDesign):
    r"""Gated KalmaNet: a faded ridge regression whose ridge follows the size of what was written.

    $$x_t = (H_t + a \| H_t \|_F I)^{-1} q_t, \qquad y_t = U_t^\top\bigl(q_t + \alpha_t (x_t - q_t)\bigr)$$

    The ridge bounds the condition number by $1 + 1/a$, whatever was written: that is its purpose, since the paper runs
    it in low precision. It also means that no fixed prior is behind it. Writing more, in any direction, raises the
    prior precision in all of them, so a memory with many writes is shrunk as much as one with few, and the variance
    $q^\top (H_t + \Lambda_t)^{-1} q$ says how it compares with what else was written, not how sure it is. Before
    anything is written, $\Lambda = I$.

    With mixing α = 1 the read is the regression's, with α = 0 that of gated linear attention. The variance is that of
    the regression for every α. The solve is exact; the paper runs 30 steps of Chebyshev iteration.

    Args:
        ridge_ratio: a > 0, the ridge in units of the Frobenius norm of $H_t$.

    Step parameters: `log_decay` log γ [B,T,H], at most 0; `write_noise` r² > 0, [B,T,H]; `mixing` α in [0, 1], [B,T,H].
    """

    ridge_ratio: float = 0.02
    title = "Gated KalmaNet"
    citation = (
        "Peng, Chattopadhyay, Zancato, Nunez, Xia & Soatto, Gated KalmaNet: A Fading Memory Layer Through Test-Time "
        "Ridge Regression, arXiv:2511.21016, 2025 (CVPR 2026)"
    )
    note = (
        "the ridge is a share of the Frobenius norm of all that was written, so that no fixed prior is behind it; the "
        "read mixes the regression with linear attention"
    )
    exactness = "adaptive ridge"
    step_parameters = (
        *RidgeDesign.step_parameters,
        StepParameter("mixing", "α_t", bound="[0, 1]", idle=1.0),
    )

    def __post_init__(self) -> None:
        ratio = self.ridge_ratio
        number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if not (number and math.isfinite(ratio) and ratio > 0):
            raise ValueError(f"KalmaNetMemory(ridge_ratio): expected a finite number above 0, got {ratio!r}")

    def ridge(self, keys: Tensor, step: Step) -> Tensor:
        """a ‖H‖, [B,H,1]; 1 where nothing was written."""
        del step
        size = self.ridge_ratio * torch.linalg.vector_norm(keys, dim=(-2, -1))[..., None]
        return torch.where(size > 0, size, 1.0)

    def mixed(self, x: Tensor, q: Tensor, step: Step) -> Tensor:
        """q + α (x − q)."""
        return q + step["mixing"][..., None] * (x - q)

    def sources(self) -> Mapping[str, Source]:
        """A mixing that starts in the middle."""
        return {**super().sources(), "mixing": Learned(0.5)}

    def assumptions(self) -> Assumptions:
        """Evidence that fades, its sums, and a ridge that follows them."""
        return Assumptions("FadingEvidence", "ObserveMemory", "Statistics")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Sums, ridge and solve."""
        return (
            ("a write observes", (_DENSITY, _FADES)),
            ("write", _WRITE),
            (
                "read",
                (
                    Equation(
                        f"x_t = (H_t + {self.ridge_ratio:g} ‖H_t‖ I)⁻¹ q_t",
                        r"\mathbf{x}_t = "
                        rf"(\mathbf{{H}}_t + {self.ridge_ratio:g} \| \mathbf{{H}}_t \|_F \mathbf{{I}})^{{-1}} "
                        r"\mathbf{q}_t",
                    ),
                    Equation(
                        "y_t = U_tᵀ (q_t + α_t (x_t − q_t))",
                        r"\mathbf{y}_t = \mathbf{U}_t^\top (\mathbf{q}_t + \alpha_t (\mathbf{x}_t - \mathbf{q}_t))",
                    ),
                ),
            ),
        )
