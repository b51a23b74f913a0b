r"""The diagonal covariance: its gains token by token, each in O(D), and then the mean chunk by chunk.

    P̄_t = A_t diag(p_{t-1}) A_tᵀ + ℓ_t² N      diagonal, or 2×2 blocks under a rotation
    u_t = P̄_t k_t,   β_t = 1/(r_t² + k_tᵀu_t),   p_t = diag(P̄_t) − β_t u_t²

The gain of a token depends on all gains before it and on no mean, so this pass is sequential but thin. Then d_t = u_t
and γ_t = β_t in ops/mean_pass.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops.mean_pass import Gains
from membydesign.ops.recurrent import Run
from membydesign.products import product

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs
    from membydesign.ops.mean_pass import Means


class DiagonalGains(NamedTuple):
    """The gains of all tokens, and the variances that they leave.

    Attributes:
        warped_key: u, [B,T,H,G,D].
        precision: β, [B,T,H,G].
        variances: p, [B,T,H,G,D].
    """

    warped_key: Tensor
    precision: Tensor
    variances: Tensor


FindGains = Callable[..., DiagonalGains]
"""A way to find the gains: `gains`, or the same in native code."""


def filter_chunk(
    drift: RowDrift,
    rows: Tensor,
    initial: Belief,
    x: Inputs,
    size: int,
    find_gains: FindGains,
    means: Means,
    *,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`ObserveMemory` with `Diagonal`, over [B,T]; `rows` is the diagonal of N, [D] or [1]."""
    warped, precision, variances = find_gains(drift, rows, initial.covariance, x)
    found = means(drift, size, initial.mean, x.q, x.k, x.v, Gains(warped, precision), return_error=return_evidence)
    return Run(
        found.output,
        Belief(found.mean, variances[:, -1].clone()),  # not a view, which would keep those of all tokens alive
        precision,
        product(variances, x.q.square()[..., None])[..., 0] if return_variance else None,
        None if found.error is None else gaussian_log_density(found.error, precision),
    )


def gains(drift: RowDrift, rows: Tensor, start: Tensor, x: Inputs) -> DiagonalGains:
    """The gains of all tokens.

    Args:
        drift: how memory drifts.
        rows: the diagonal of N, [D] or [1].
        start: the variances before the first token, [B,H,G,D].
        x: inputs over [B,T].
    """
    assert x.process_noise is not None
    # one unbind for all tokens: the gradient of each x[:, t] would be as large as x
    squared_decay = (2 * drift.of_rows()).exp()[:, :, :, None].unbind(1)
    noise = (x.process_noise[..., None] * rows)[:, :, :, None].unbind(1)
    k, write_noise = x.k[:, :, :, None].unbind(1), x.write_noise.unbind(1)
    angle = None if drift.angle is None else drift.angle[:, :, :, None].unbind(1)
    p, found = start, []
    for t in range(len(k)):
        turn = None if angle is None else angle[t]
        found.append(_gain(p, squared_decay[t], noise[t], k[t], write_noise[t], turn))
        p = found[-1].variances
    return DiagonalGains(*(torch.stack(each, 1) for each in zip(*found, strict=True)))


def _gain(
    p: Tensor, squared_decay: Tensor, noise: Tensor, k: Tensor, write_noise: Tensor, angle: Tensor | None
) -> DiagonalGains:
    """One token: the same without the axis T; p [B,H,G,D], squared_decay, noise, k and angle [B,H,1,·]."""
    faded = squared_decay * p
    if angle is None:
        predicted = faded + noise
        u = predicted * k
    else:
        cos, sin = angle.cos(), angle.sin()
        real, imaginary = faded[..., 0::2], faded[..., 1::2]
        diagonal = (cos**2 * real + sin**2 * imaginary, sin**2 * real + cos**2 * imaginary)
        predicted = torch.stack(diagonal, -1).flatten(-2) + noise
        across = cos * sin * (real - imaginary)
        swapped = torch.stack((across * k[..., 1::2], across * k[..., 0::2]), -1).flatten(-2)
        u = predicted * k + swapped
    precision = 1 / (write_noise + (k * u).sum(-1))
    return DiagonalGains(u, precision, predicted - precision[..., None] * u.square())
