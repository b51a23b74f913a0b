r"""The diagonal covariance: its gains token by token, each in O(D), and then the mean chunk by chunk.

    P̄_t = A_t diag(p_{t-1}) A_tᵀ + ℓ_t² N      diagonal, or 2×2 blocks under a rotation
    u_t = P̄_t k_t,   β_t = 1/(r_t² + k_tᵀu_t),   p_t = diag(P̄_t) − β_t u_t²

The gain of a token depends on all gains before it and on no mean, so this pass is sequential but thin. Then d_t = u_t
and γ_t = β_t in ops/mean_pass.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops.mean_pass import Gains
from membydesign.ops.recurrent import Run

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs
    from membydesign.ops.mean_pass import Means


class _Gain(NamedTuple):
    variances: Tensor  # p_t, [B,H,G,D]
    warped_key: Tensor  # u_t, [B,H,G,D]
    precision: Tensor  # β_t, [B,H,G]


def filter_chunk(
    drift: RowDrift,
    rows: Tensor,
    initial: Belief,
    x: Inputs,
    size: int,
    means: Means,
    *,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`ObserveMemory` with `Diagonal`, over [B,T]; `rows` is the diagonal of N, [D] or [1]."""
    assert initial.covariance is not None
    p, found = initial.covariance, []
    for t in range(x.q.shape[1]):
        found.append(_gain(drift, rows, p, x, t))
        p = found[-1].variances
    warped, precision = (
        torch.stack([getattr(gain, name) for gain in found], 1) for name in ("warped_key", "precision")
    )
    found_means = means(
        drift, size, initial.mean, x.q, x.k, x.v, Gains(warped, precision), return_error=return_evidence
    )
    variance = None
    if return_variance:
        variances = torch.stack([gain.variances for gain in found], 1)
        variance = torch.einsum("bthgd,bthd->bthg", variances, x.q.square())
    return Run(
        found_means.output,
        Belief(found_means.mean, p),
        precision,
        variance,
        None if found_means.error is None else gaussian_log_density(found_means.error, precision),
    )


def _gain(drift: RowDrift, rows: Tensor, p: Tensor, x: Inputs, t: int) -> _Gain:
    assert x.process_noise is not None
    noise = x.process_noise[:, t, :, None] * rows  # [B,H,D]
    squared_decay = (2 * drift.log_decay[:, t]).exp()
    k = x.k[:, t, :, None]
    faded = squared_decay[:, :, None] * p
    if drift.angle is None:
        predicted = faded + noise[:, :, None]
        u = predicted * k
    else:
        cos, sin = drift.angle[:, t, :, None].cos(), drift.angle[:, t, :, None].sin()
        real, imaginary = faded[..., 0::2], faded[..., 1::2]
        diagonal = (cos**2 * real + sin**2 * imaginary, sin**2 * real + cos**2 * imaginary)
        predicted = torch.stack(diagonal, -1).flatten(-2) + noise[:, :, None]
        across = cos * sin * (real - imaginary)
        swapped = torch.stack((across * k[..., 1::2], across * k[..., 0::2]), -1).flatten(-2)
        u = predicted * k + swapped
    precision = 1 / (x.write_noise[:, t] + (k * u).sum(-1))
    return _Gain(predicted - precision[..., None] * u.square(), u, precision)
