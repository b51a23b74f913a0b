r"""One predict and one update for the whole Gaussian family.

Every design of the catalogue is this step; what differs is only where the warped key $u_t$, the precision $\beta_t$ and
the error $e_t$ of its write come from (`kalman/naive.py`, `delta/naive.py`, `additive/naive.py`).

    predict   M̄ = A M,              P̄ = A P Aᵀ + ℓ² N
    update    M = M̄ + β u eᵀ,       P = P̄ − β u uᵀ
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.belief import Belief

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Transition
    from membydesign.ops.inputs import Inputs


class WriteEvent(NamedTuple):
    r"""What one write tells the belief: a scalar-per-column observation with error e, seen through u.

    Attributes:
        warped_key: $u = \mathrm{Cov}(S, v)$, where the write lands, [B,H,G,D].
        precision: $\beta = 1/\mathrm{Var}(v)$, the innovation precision, [B,H,G].
        error: $e = v - \hat v$, the innovation, [B,H,M].
    """

    warped_key: Tensor
    precision: Tensor
    error: Tensor


def predict(transition: Transition, belief: Belief, x: Inputs) -> Belief:
    r"""Let memory drift one step: $\bar M = A M$, $\bar P = A P A^\top + \ell^2 N$ (where a covariance is kept)."""
    mean = transition.apply(belief.mean, x.log_decay, x.angle)
    if mean.shape != belief.mean.shape:
        raise ValueError(
            f"{type(transition).__name__}.apply: expected to return the shape of x, {list(belief.mean.shape)}, "
            f"got {list(mean.shape)}"
        )
    if belief.covariance is None:
        return Belief(mean)
    log_decay = None if x.log_decay is None else x.log_decay.unsqueeze(2)  # an axis for the noise groups
    angle = None if x.angle is None else x.angle.unsqueeze(2)
    half = transition.apply(belief.dense_covariance(), log_decay, angle)  # A P
    covariance = transition.apply(half.mT, log_decay, angle)  # A (A P)ᵀ = A P Aᵀ
    covariance = (covariance + covariance.mT) / 2  # symmetric to the last bit
    if x.process_noise is not None:
        rows = x.process_noise[..., None, None] * transition.noise_rows(mean)
        covariance = covariance + torch.diag_embed(rows)
    return Belief(mean, covariance)


def update(predicted: Belief, write: WriteEvent) -> Belief:
    r"""Condition on a write: $M = \bar M + \beta u e^\top$, $P = \bar P - \beta u u^\top$."""
    kalman_gain = write.precision[..., None] * write.warped_key
    error = write.error.unflatten(-1, (kalman_gain.shape[2], -1))
    mean = predicted.mean + (kalman_gain[..., None] * error[..., None, :]).movedim(2, 3).flatten(-2)
    if predicted.covariance is None:
        return Belief(mean)
    u = write.warped_key
    downdate = write.precision[..., None, None] * (u[..., :, None] * u[..., None, :])
    return Belief(mean, predicted.covariance - downdate)
