r"""Variational Linear Attention: least squares with a penalty matrix whose growth is learned.

    B_t = B_{t-1} + u_t u_tᵀ                      the penalty; its inverse A_t = B_t⁻¹ by Sherman and Morrison
    A_t = A_{t-1} − A_{t-1} u_t u_tᵀ A_{t-1} / (1 + u_tᵀ A_{t-1} u_t)
    g_t = A_t k_t / ‖A_t k_t‖                     where the write lands, with length one
    M_t = M_{t-1} + g_t (v_t − M_{t-1}ᵀ k_t)ᵀ

With u = k and the gain A k itself, this is recursive least squares: the Kalman filter of a memory that does not drift,
with r² = 1. The published layer learns the direction u and normalises the gain; both leave the regression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from membydesign.belief import gaussian_log_density
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Step, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Learned
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design.sources import Source
    from membydesign.state import Sizes


class PenalisedMemory(NamedTuple):
    """A memory and the inverse of its penalty.

    Attributes:
        mean: M, [B,H,D,M].
        inverse_penalty: A, [B,H,D,D].
    """

    mean: Tensor
    inverse_penalty: Tensor


@final
@dataclass(frozen=True)
class PenalisedLeastSquares(Design):
    r"""Variational Linear Attention: a delta rule whose direction a learned penalty bends.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad g_t = A_t k_t / \| A_t k_t \|, \qquad
    M_t = M_{t-1} + g_t (v_t - M_{t-1}^\top k_t)^\top$$

    The penalty grows along `penalty` $u_t$, which need not be the key. A gain of length one never shrinks, however
    much was written: unlike a Kalman gain it overwrites old content at the strength of a new memory, and only its
    direction turns away from penalised directions. Where $A_t k_t$ is zero, nothing is written.

    With `unit_gain=False` the gain is $A_t k_t$. Together with $u_t = k_t$ this is recursive least squares, and equals
    the exact filter `DesignModel(Identity(), ObserveMemory(), Dense())` with r² = 1 and no process noise.

    The log evidence is that of recursive least squares, $v_t \sim \mathcal N(M^\top k, (1 + k^\top A_{t-1} k) I)$, and
    the variance of a read $q^\top A_t q$. Both are beliefs of that regression, so they score writes and reads, but are
    calibrated only where the regression is the one that runs.

    Args:
        prior_variance: A₀ = prior_variance · I; the published layer has 1/10.
        unit_gain: whether the gain has length one.

    Step parameters: `penalty` u [B,T,H,D].
    """

    prior_variance: float = 0.1
    unit_gain: bool = True
    title = "Variational Linear Attention"
    citation = (
        "Pandey & Singh, Variational Linear Attention: Stable Associative Memory for Long-Context Transformers, "
        "arXiv:2605.11196, 2026"
    )
    note = (
        "a learned penalty direction and a gain of length one in place of those of recursive least squares; "
        "unit_gain=False with the key as penalty is recursive least squares, an exact filter"
    )
    exactness = "gain of length one"
    step_parameters = (StepParameter("penalty", "u_t", axes=("D",)),)
    has_variance = True

    def __post_init__(self) -> None:
        number = isinstance(self.prior_variance, (int, float)) and not isinstance(self.prior_variance, bool)
        if not (number and math.isfinite(self.prior_variance) and self.prior_variance > 0):
            raise ValueError(
                f"PenalisedLeastSquares(prior_variance): expected a finite number above 0, got {self.prior_variance!r}"
            )
        if not isinstance(self.unit_gain, bool):
            raise ValueError(f"PenalisedLeastSquares(unit_gain): expected True or False, got {self.unit_gain!r}")
        if not self.unit_gain:
            object.__setattr__(self, "exactness", "learned penalty")

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> PenalisedMemory:
        """M₀ = 0, A₀ = prior_variance · I."""
        eye = self.prior_variance * torch.eye(sizes.D, dtype=dtype, device=device)
        start = eye.expand(sizes.batch, sizes.heads, sizes.D, sizes.D).clone()
        return PenalisedMemory(torch.zeros(sizes, dtype=dtype, device=device), start)

    def predict(self, state: PenalisedMemory, step: Step) -> PenalisedMemory:
        """Nothing drifts."""
        del step
        return state

    def condition(self, state: PenalisedMemory, k: Tensor, v: Tensor, step: Step) -> Written:
        """A by Sherman and Morrison, then the write along A k."""
        A, u = state.inverse_penalty, step["penalty"]
        z = product(A, u[..., None])[..., 0]
        lowered = z / (1 + (u * z).sum(-1, keepdim=True)).sqrt()
        after = A - lowered[..., :, None] * lowered[..., None, :]
        gain = product(after, k[..., None])[..., 0]
        if self.unit_gain:
            size = torch.linalg.vector_norm(gain, dim=-1, keepdim=True)
            gain = gain / torch.where(size > 0, size, 1.0)
        error = v - product(k[..., None, :], state.mean)[..., 0, :]
        mean = state.mean + gain[..., :, None] * error[..., None, :]
        variance = (product(A, k[..., None])[..., 0] * k).sum(-1, keepdim=True)
        precision = 1 / (1 + variance)
        return Written(PenalisedMemory(mean, after), gaussian_log_density(error, precision), precision)

    def read(self, state: PenalisedMemory, q: Tensor, step: Step) -> Reading:
        """Mᵀ q, and qᵀ A q."""
        del step
        variance = (product(state.inverse_penalty, q[..., None])[..., 0] * q).sum(-1, keepdim=True)
        return Reading(product(q[..., None, :], state.mean)[..., 0, :], variance.clamp_min(0))

    def state_flaws(self, state: PenalisedMemory, *, thorough: bool) -> list[Flaw]:
        """An inverse penalty that is not positive semi-definite."""
        A = state.inverse_penalty
        diagonal = A.diagonal(dim1=-2, dim2=-1)
        scale = diagonal.abs().amax(-1).clamp_min(torch.finfo(A.dtype).tiny)[..., None, None]
        rounding = 8 * max(A.shape[-1], 8) * torch.finfo(A.dtype).eps
        lost = diagonal.amin(-1) < -rounding * scale[..., 0, 0]
        if thorough:
            eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
            lost = torch.linalg.cholesky_ex((A + A.mT) / (2 * scale) + rounding * eye).info != 0
        return [
            Flaw(
                "inverse_penalty",
                "positive semi-definite matrices",
                lost,
                lambda index: f"a negative eigenvalue at index {index}",
                NotPositiveDefiniteError,
            )
        ]

    def sources(self) -> Mapping[str, Source]:
        """A linear map of the input."""
        return {"penalty": Learned(0.0)}

    def state_size(self, D: int, M: int) -> StateSize:
        """M and A."""
        return StateSize(mean=D * M, covariance=D * D)

    def state_formula(self) -> str:
        """M and A."""
        return "D·M + D²"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Three products with A and its update, the prediction, the write and the read."""
        return "D² + D·M", 4 * D * D + 3 * D * M

    def assumptions(self) -> Assumptions:
        """A static memory and a penalty."""
        return Assumptions("Identity", "UnitGain" if self.unit_gain else "LeastSquares", "Penalty")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Penalty, gain, write and read."""
        gain = Equation("g_t = A_t k_t", r"\mathbf{g}_t = \mathbf{A}_t \mathbf{k}_t")
        if self.unit_gain:
            gain = Equation(
                "g_t = A_t k_t / ‖A_t k_t‖",
                r"\mathbf{g}_t = \mathbf{A}_t \mathbf{k}_t / \| \mathbf{A}_t \mathbf{k}_t \|",
            )
        penalty = Equation(
            "A_t = (A_{t-1}⁻¹ + u_t u_tᵀ)⁻¹",
            r"\mathbf{A}_t = (\mathbf{A}_{t-1}^{-1} + \mathbf{u}_t \mathbf{u}_t^\top)^{-1}",
        )
        write = Equation(
            "M_t = M_{t-1} + g_t (v_t − M_{t-1}ᵀ k_t)ᵀ",
            r"\mathbf{M}_t = \mathbf{M}_{t-1} + \mathbf{g}_t (\mathbf{v}_t - \mathbf{M}_{t-1}^\top \mathbf{k}_t)^\top",
        )
        return (
            ("write", (penalty, gain, write)),
            ("read", (Equation("y_t = M_tᵀ q_t", r"\mathbf{y}_t = \mathbf{M}_t^\top \mathbf{q}_t"),)),
        )
