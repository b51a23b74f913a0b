r"""Covariances that are kept as precisions and truncated there: Kalman Delta Networks.

A write adds $k k^\top / r^2$ to the precision $\bar P^{-1}$. Keeping the diagonal of that sum, or one number for all of
it, costs no more than the delta rule's gate:

    diagonal    1/p_i = 1/p̄_i + c k_i² / r²           D numbers
    isotropic   1/p   = 1/p̄   + c ‖k‖² / (D r²)       one number

`Diagonal` keeps the diagonal of the posterior *covariance* instead, which is the larger of the two. The factor c counts
the evidence of a write more than once; the published layers take c = D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from membydesign.belief import Belief, DiagonalBelief
from membydesign.design.covariance import Covariance, check_prior, times_groups
from membydesign.design.protocol import Flaw, Step
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sequence_drift import Drift, Gains, SequenceDrift
from membydesign.design.sources import Learned
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from membydesign.design.write import WriteEvent
    from membydesign.state import Sizes


class IsotropicBelief(Belief):
    """A belief with one variance for all directions.

    Attributes:
        mean: M, [B,H,D,M].
        covariance: p, where P = p I, [B,H,G].
    """

    __slots__ = ()

    def variance(self, q: Tensor) -> Tensor:
        r"""The variance $p \| q \|^2$ of each coordinate of the read-out at q, [B,H,D]: [B,H,G]."""
        self._check("q", q, self.mean.shape[:3])
        return self.covariance * q.square().sum(-1, keepdim=True)

    def dense_covariance(self) -> Tensor:
        """P as matrices [B,H,G,D,D]."""
        D = self.mean.shape[-2]
        return torch.diag_embed(self.covariance[..., None].expand(*self.covariance.shape, D))


torch.serialization.add_safe_globals([IsotropicBelief])


def _check_times_counted(name: str, times: float | None) -> None:
    number = isinstance(times, (int, float)) and not isinstance(times, bool)
    if times is not None and not (number and math.isfinite(times) and times > 0):
        raise ValueError(f"{name}(times_counted): expected None or a finite number above 0, got {times!r}")


def _write_noise(event: WriteEvent, k: Tensor) -> Tensor:
    """r² of the observation that a write amounts to, [B,H,G]."""
    if event.noise is not None:
        return event.noise
    return 1 / event.precision - (k[:, :, None] * event.warped_key).sum(-1)


def _negative(kept: Tensor) -> list[Flaw]:
    return [
        Flaw(
            "covariance",
            "variances of at least 0",
            kept < 0,
            lambda _: f"{kept.min().item():.3g}",
            NotPositiveDefiniteError,
        )
    ]


@final
@dataclass(frozen=True)
class InformationDiagonal(Covariance):
    r"""Only the diagonal of the precision survives each write.

    $$\bar p = \mathrm{diag}(A_t\, \mathrm{diag}(p_{t-1})\, A_t^\top) + \omega_t, \qquad
    \frac{1}{p_{t,i}} = \frac{1}{\bar p_i} + \frac{c\, k_{t,i}^2}{r_t^2}, \qquad p_0 = \text{prior}$$

    With c = 1 this is the diagonal of the exact posterior precision. Off-diagonal precision is what says that a write
    observed one sum of all rows; without it each row is as sure as if it had been observed alone, so variances are
    smaller than those of `Diagonal`. The published layer takes c = D: keys of length one then count as if every row had
    been observed with $k_i^2 = 1$ on average.

    Args:
        prior: $p_0$, the variance of every direction before anything is written.
        times_counted: c, how many times the evidence of a write is counted; None for D.

    Step parameters: `process_noise` $\omega_t$ ≥ 0, one for each row, [B,T,H] or [B,T,H,D].
    State: G·D elements, [B,H,G,D].
    """

    prior: float = 1.0
    times_counted: float | None = None
    exactness = "diagonal precision"
    belief = DiagonalBelief
    step_parameters = (StepParameter("process_noise", "ω_t", axes=("D",), optional_axes=True, bound=">= 0"),)
    parameter_sources = {"process_noise": Learned(0.05)}
    predicts = False  # its own noise of rows enters, not the transition's

    def __post_init__(self) -> None:
        check_prior("InformationDiagonal", self.prior)
        _check_times_counted("InformationDiagonal", self.times_counted)

    def counted(self, D: int) -> float:
        """c for keys of size D."""
        return float(D) if self.times_counted is None else self.times_counted

    @property
    def equations(self) -> tuple[Equation, ...]:
        """p̄ = diag(A diag(p) Aᵀ) + ω, 1/p = 1/p̄ + c k²/r²."""
        c = "D" if self.times_counted is None else f"{self.times_counted:g}"
        return (
            Equation(
                "P̄_t = the diagonal of A_t P_{t-1} A_tᵀ + diag(ω_t)",
                r"\bar{\mathbf{P}}_t = \mathrm{diag}(\mathrm{diag}(\mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top)"
                r" + \omega_t)",
            ),
            Equation(
                f"P_t⁻¹ = P̄_t⁻¹ + {c} · diag(k_t²) / r_t²",
                rf"\mathbf{{P}}_t^{{-1}} = \bar{{\mathbf{{P}}}}_t^{{-1}} + "
                rf"\frac{{{c}}}{{r_t^2}} \mathrm{{diag}}(\mathbf{{k}}_t^2)",
            ),
        )

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
        """p₀ for every row and group."""
        return torch.full((sizes.batch, sizes.heads, groups, sizes.D), self.prior, dtype=dtype, device=device)

    def predict(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """The diagonal of A diag(p) Aᵀ, and ω."""
        return drifted(torch.diag_embed(kept)).diagonal(dim1=-2, dim2=-1) + step["process_noise"][:, :, None]

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        """P̄ k."""
        return predicted * k[:, :, None]

    def condition(self, predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
        """p̄ / (1 + c k² p̄ / r²)."""
        noise = _write_noise(event, k)[..., None]
        return predicted / (1 + self.counted(k.shape[-1]) * k[:, :, None].square() * predicted / noise)

    def variance(self, kept: Tensor, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """Σ p q²."""
        del noise, step
        return product(kept, (q * q)[..., None])[..., 0]

    def gains(self, kept: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        """Token by token, each in O(D): turns of pairs leave a diagonal, too."""
        if drift.rows.removal is not None or drift.rows.angle is not None:
            return self.gains_by_token(kept, k, drift, q)
        c = self.counted(k.shape[-1])
        squared_decay = (2 * drift.rows.log_decay).exp()[:, :, :, None].unbind(1)
        noise = drift.parameters["process_noise"][:, :, :, None].unbind(1)
        counted = (c * k.square()[:, :, :, None] / drift.write_noise[..., None]).unbind(1)
        p, predicted, every = kept, [], []
        for t in range(len(noise)):
            predicted.append(squared_decay[t] * p + noise[t])
            p = predicted[-1] / (1 + counted[t] * predicted[-1])
            every.append(p)
        direction = torch.stack(predicted, 1) * k[:, :, :, None]
        precision = 1 / (drift.write_noise + (direction * k[:, :, :, None]).sum(-1))
        variance = None if q is None else product(torch.stack(every, 1), q.square()[..., None])[..., 0]
        return Gains(direction, precision, precision, p, variance)

    def flaws(self, kept: Tensor, *, thorough: bool) -> list[Flaw]:
        """Negative variances."""
        del thorough
        return _negative(kept)

    def with_prior(self, prior: float) -> InformationDiagonal:
        """The same with another prior."""
        return InformationDiagonal(prior, self.times_counted)

    def elements(self, D: int, groups: int) -> int:
        """G·D."""
        return groups * D

    def formula(self, groups: int) -> str:
        """D for each group."""
        return times_groups(groups, "D")

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """Drift from both sides, the warped key, and the precision entry by entry."""
        return "G·D", groups * D * (2 * drift + 4)


@final
@dataclass(frozen=True)
class Isotropic(Covariance):
    r"""One variance for all directions: $P_t = p_t I$.

    $$\bar p = \frac{1}{D}\,\mathrm{tr}(p_{t-1} A_t A_t^\top + Q_t), \qquad
    \frac{1}{p_t} = \frac{1}{\bar p} + \frac{c \| k_t \|^2}{D\, r_t^2}, \qquad p_0 = \text{prior}$$

    With c = 1 this keeps the mean of the exact posterior precision over directions. Gains are those of a delta rule
    whose gate follows from how much was written, in whatever direction. The published layer takes c = D: every write
    then makes all directions as sure as the one that was written.

    Args:
        prior: $p_0$, the variance of every direction before anything is written.
        times_counted: c, how many times the evidence of a write is counted; None for D.

    Step parameters: `process_noise` $\ell_t^2$ ≥ 0, [B,T,H].
    State: G elements, [B,H,G].
    """

    prior: float = 1.0
    times_counted: float | None = None
    exactness = "isotropic precision"
    belief = IsotropicBelief

    def __post_init__(self) -> None:
        check_prior("Isotropic", self.prior)
        _check_times_counted("Isotropic", self.times_counted)

    def counted(self, D: int) -> float:
        """c/D for keys of size D."""
        return 1.0 if self.times_counted is None else self.times_counted / D

    @property
    def equations(self) -> tuple[Equation, ...]:
        """p̄ = tr(p A Aᵀ + Q)/D, 1/p = 1/p̄ + c‖k‖²/(D r²)."""
        c = "" if self.times_counted is None else f"{self.times_counted:g}/D · "
        latex = "" if self.times_counted is None else rf"\frac{{{self.times_counted:g}}}{{D}}"
        return (
            Equation(
                "P̄_t = p̄_t I,  p̄_t = tr(A_t P_{t-1} A_tᵀ + ℓ_t² N) / D",
                r"\bar{\mathbf{P}}_t = \bar p_t \mathbf{I},\quad \bar p_t = \frac{1}{D}\, \mathrm{tr}("
                r"\mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top + \ell_t^2 \mathbf{N})",
            ),
            Equation(
                f"P_t = p_t I,  1/p_t = 1/p̄_t + {c}‖k_t‖² / r_t²",
                r"\mathbf{P}_t = p_t \mathbf{I},\quad 1/p_t = 1/\bar p_t + "
                rf"{latex} \| \mathbf{{k}}_t \|^2 / r_t^2",
            ),
        )

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
        """p₀ for every group."""
        return torch.full((sizes.batch, sizes.heads, groups), self.prior, dtype=dtype, device=device)

    def predict(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """The mean variance of a direction after the drift, [B,H,G]."""
        eye = torch.eye(step.k.shape[-1], dtype=kept.dtype, device=kept.device)
        return drifted(kept[..., None, None] * eye).diagonal(dim1=-2, dim2=-1).mean(-1)

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        """p̄ k."""
        return predicted[..., None] * k[:, :, None]

    def condition(self, predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
        """p̄ / (1 + c ‖k‖² p̄ / (D r²))."""
        evidence = self.counted(k.shape[-1]) * k.square().sum(-1, keepdim=True) / _write_noise(event, k)
        return predicted / (1 + evidence * predicted)

    def variance(self, kept: Tensor, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """p ‖q‖²."""
        del noise, step
        return kept * q.square().sum(-1, keepdim=True)

    def gains(self, kept: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        """Token by token, with one number per group; every write lands in the direction of its key."""
        if drift.rows.removal is not None or drift.noise is None:
            return self.gains_by_token(kept, k, drift, q)
        squared_decay = (2 * drift.rows.of_rows()).exp().mean(-1)[..., None].unbind(1)
        length = k.square().sum(-1, keepdim=True)
        evidence = (self.counted(k.shape[-1]) * length / drift.write_noise).unbind(1)
        noises = drift.noise.entering(drift.rows).mean(-1)[..., None].unbind(1)
        p, predicted, every = kept, [], []
        for t in range(len(noises)):
            predicted.append(squared_decay[t] * p + noises[t])
            p = predicted[-1] / (1 + evidence[t] * predicted[-1])
            every.append(p)
        before = torch.stack(predicted, 1)
        precision = 1 / (drift.write_noise + before * length)
        variance = None if q is None else torch.stack(every, 1) * q.square().sum(-1, keepdim=True)
        return Gains(k[:, :, :, None], before * precision, precision, p, variance)

    def flaws(self, kept: Tensor, *, thorough: bool) -> list[Flaw]:
        """Negative variances."""
        del thorough
        return _negative(kept)

    def with_prior(self, prior: float) -> Isotropic:
        """The same with another prior."""
        return Isotropic(prior, self.times_counted)

    def elements(self, D: int, groups: int) -> int:
        """G."""
        del D
        return groups

    def formula(self, groups: int) -> str:
        """One number for each group."""
        return str(groups)

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """The mean of the squared decays, the length of the key, and the gain."""
        return "D", D * (drift + 1 + groups)
