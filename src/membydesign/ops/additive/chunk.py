r"""The additive family, chunk by chunk: no error is corrected, so a chunk is one masked product.

    d_t = k_t,   γ_t = ω_t = λ_t / (λ_t + r_t²)                 then ops/mean_pass.py, without its solve

Where a covariance is kept, it adds up in the same way:

    P_C = f_C P₀ f_C + Σ_σ φ_Cσ k_σ (ω_σ r_σ²) k_σᵀ φ_Cσ
    variance of the read at τ = q̃_τᵀ P₀ q̃_τ + Σ_{σ≤τ} ω_σ r_σ² (q_τᵀ φ_τσ k_σ)²
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops.frame import Frame, cut, joined
from membydesign.ops.mean_pass import Gains
from membydesign.ops.recurrent import Run
from membydesign.products import product

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs
    from membydesign.ops.mean_pass import Means


def filter_chunk(
    drift: RowDrift,
    initial: Belief,
    x: Inputs,
    size: int,
    means: Means,
    *,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`LatentInput` with `MeanOnly` or `Dense`, over [B,T]."""
    assert x.prior_variance is not None
    precision = 1 / (x.prior_variance + x.write_noise)
    trust = precision * x.prior_variance
    found = means(drift, size, initial.mean, x.q, None, x.v, Gains(x.k, trust), return_error=False)
    covariance = variance = None
    if initial.covariance is not None:
        left = (trust * x.write_noise)[..., 0]  # ω r²: what a write leaves unknown of its coefficient
        covariance, variance = _covariance_pass(Frame.of(drift, size), size, initial.covariance[:, :, 0], x, left)
        covariance = covariance[:, :, None]
    return Run(
        found.output,
        Belief(found.mean, covariance),
        precision,
        variance if return_variance else None,
        gaussian_log_density(x.v, precision) if return_evidence else None,
    )


def _covariance_pass(frame: Frame, size: int, P: Tensor, x: Inputs, left: Tensor) -> tuple[Tensor, Tensor]:
    """The covariance at the end, [B,H,D,D], and the variance of every read, [B,T,H,1]."""
    left = cut(left, size)
    k, q = frame.enter(cut(x.k, size)), frame.enter(cut(x.q, size))
    at_end = frame.to_end(k)
    added = product((at_end * left[..., None]).mT, at_end)
    f = frame.over_chunk()
    starts = []
    for i in range(k.shape[2]):
        starts.append(P)
        inside = f[:, :, i, :, None] * f[:, :, i, None, :] * P + added[:, :, i]
        half = frame.leave(inside, i)
        P = frame.leave(half.mT, i)
        P = (P + P.mT) / 2
    queries = frame.from_start(q)
    before = (product(queries, torch.stack(starts, 2)) * queries).sum(-1)
    inside = (frame.product(q, k).square() * left[..., None, :]).sum(-1)
    return P, joined((before + inside)[..., None], x.q.shape[1])
