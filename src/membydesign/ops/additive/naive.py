r"""The additive family, one step: the write observes its own coefficient φ_t, not the memory.

    M̄_t = A_t M_{t-1},   P̄_t = A_t P_{t-1} A_tᵀ + λ_t k_t k_tᵀ       S_t = A_t S_{t-1} + k_t φ_tᵀ
    u_t  = λ_t k_t                               Cov(S_t, v_t), since v_t = φ_t + noise
    β_t  = 1 / (λ_t + r_t²)                      Var(v_t) = λ_t + r_t²
    M_t  = M̄_t + ω_t k_t v_tᵀ                   ω_t = β_t λ_t, and v_t is predicted to be zero
    P_t  = P̄_t − β_t u_t u_tᵀ                   = A_t P_{t-1} A_tᵀ + ω_t r_t² k_t k_tᵀ

The appendix on the latent-input design model. The mean never reads P, so `MeanOnly` is exact without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.belief import Belief
from membydesign.ops.gaussian import WriteEvent, predict, update

if TYPE_CHECKING:
    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs


def step(design: DesignModel, belief: Belief, x: Inputs) -> tuple[Belief, WriteEvent]:
    """One drift and one write, for `LatentInput` with `MeanOnly` or `Dense`."""
    assert x.prior_variance is not None
    predicted = predict(design.transition, belief, x)
    u = x.prior_variance[..., None] * x.k[..., None, :]
    if predicted.covariance is not None:
        outer = x.k[..., None, :, None] * x.k[..., None, None, :]
        predicted = Belief(predicted.mean, predicted.covariance + x.prior_variance[..., None, None] * outer)
    write = WriteEvent(u, precision=1 / (x.prior_variance + x.write_noise), error=x.v)
    return update(predicted, write), write
