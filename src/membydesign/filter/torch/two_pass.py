r"""Gains first, then the mean chunk by chunk: every covariance that knows its gains, and additive writes.

The covariance never sees values, so its pass over the sequence comes first (`Covariance.gains`). The mean then follows
the delta rule with those gains (`mean_pass.py`). Additive writes have gains that are known in advance,

    d_t = k_t,   γ_t = ω_t = λ_t / (λ_t + r_t²),        and no error to correct.

Where an additive design keeps a covariance, that adds up in the same way:

    P_C = f_C P₀ f_C + Σ_σ φ_Cσ k_σ (ω_σ r_σ²) k_σᵀ φ_Cσ
    variance of the read at τ = q̃_τᵀ P₀ q̃_τ + Σ_{σ≤τ} ω_σ r_σ² (q_τᵀ φ_τσ k_σ)²

A drift that removes, A_t = diag(w_t) − b_t κ_tᵀ, makes each token two writes, one after the other:

    first   decay w_t,   key κ_t ⊘ w_t,   direction b_t,   value 0:      M' = diag(w_t) M_{t-1} − b_t (M_{t-1}ᵀ κ_t)ᵀ
    then    no decay,    key 0,           direction k_t,   value v_t:    M_t = M' + ω_t k_t v_tᵀ

so decays must stay away from 0, since 1/w is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from membydesign.belief import gaussian_log_density, innovation_squares, log_density_of_squares
from membydesign.design import DesignModel, Gains, RowDrift
from membydesign.design.sequence_drift import squared_norm
from membydesign.filter import loop
from membydesign.filter.inputs import LONGEST_CHUNK, Run
from membydesign.filter.linear import sequence_drift, why_not_two_pass
from membydesign.filter.torch.frame import Frame, cut, joined
from membydesign.filter.torch.mean_pass import MeanPass, mean_pass
from membydesign.filter.transforms import hidden, values
from membydesign.products import product

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Inputs, Request
    from membydesign.filter.torch.mean_pass import Means

NAME, BACKEND = "torch, gains then chunks of the mean", "torch"

GainsOf = Callable[..., "Gains | None"]
"""Computes the gains of a sequence: `Covariance.gains`, or the same in native code."""

STRONGEST = -60.0
"""The smallest log-decay next to a removal: e^60 still has room below float32's largest number."""


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    reason = why_not_two_pass(design, request.x)
    if reason is not None:
        return reason
    assert isinstance(design, DesignModel)
    return _why_not_removal(design, request)


def _why_not_removal(design: DesignModel, request: Request) -> str | None:
    """Why a drift that removes cannot run in chunks, if the design has one."""
    x = request.x
    drift = design.transition.row_drift(x.parameters, x.k)
    if drift is None or drift.removal is None:
        return None
    if x.k.shape[1] == 1 and request.backend in ("auto", "torch"):  # whose last kernel is the loop
        return "for a single token, which needs no chunks"
    log_decay = drift.log_decay
    if not hidden(log_decay) and not values(log_decay).min().item() >= STRONGEST:
        return f"for log-decays below {STRONGEST}, since 1/w is formed in chunks"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in torch."""
    assert isinstance(design, DesignModel)
    columns = design.gain_groups(request.x.v.shape[-1]) > design.groups  # a triangular system for every value column
    return run_with(design, request, mean_pass, 16 if columns else 64)


def run_with(
    design: DesignModel,
    request: Request,
    means: Means,
    size: int,
    gains_of: GainsOf | None = None,
    norms: Callable[[Tensor], Tensor] = squared_norm,
) -> Run:
    """Filter [B,T] with any implementation of the passes.

    Args:
        design: the assumptions.
        request: what to compute.
        means: the mean pass.
        size: tokens in a chunk, unless the user names a number.
        gains_of: computes the gains; by default the covariance itself.
        norms: computes the squared norms of keys, for covariances whose gains depend on nothing else.
    """
    if not design.write.observes_memory:
        return _additive(design, request, means, size)
    x, initial, size = request.x, request.initial, request.tokens_in_chunk(size)
    drift = sequence_drift(design, request)._replace(squared_norm=norms)
    gains_of = design.covariance.gains if gains_of is None else gains_of
    gains = gains_of(initial.covariance, x.k, drift, x.q if request.return_variance else None)
    if gains is None:
        return loop.run(design, request)
    means_out = means(drift.rows, size, initial.mean, x.q, x.k, x.v, gains, return_error=request.return_evidence)
    squares = evidence = None
    if means_out.error is not None:
        squares = innovation_squares(means_out.error, gains.precision)
        evidence = log_density_of_squares(squares, gains.precision, x.v.shape[-1])
    state = type(initial)(means_out.mean, gains.kept)
    return Run(means_out.output, state, gains.precision, gains.variance, evidence, squares)


def _additive(design: DesignModel, request: Request, means: Means, size: int) -> Run:
    """Writes that observe only what they add."""
    x, initial = request.x, request.initial
    drift = design.transition.row_drift(x.parameters, x.k)
    noise, prior_variance = design.write.noise(x.parameters), x.parameters["prior_variance"][..., None]
    assert drift is not None
    assert noise is not None
    precision = 1 / (prior_variance + noise)
    trust = precision * prior_variance
    gains = Gains(x.k[..., None, :], trust, precision, None)
    if drift.removal is None:
        size = request.tokens_in_chunk(size)
        result = means(drift, size, initial.mean, x.q, None, x.v, gains, return_error=False)
    else:
        size = min(2 * min(request.chunk_size, LONGEST_CHUNK) if request.chunk_size else size, 2 * x.q.shape[1])
        result = _with_removal(drift, size, initial.mean, x, gains, means)
    covariance = variance = None
    if initial.covariance is not None:
        left = (trust * noise)[..., 0]  # ω r²: what a write leaves unknown of its coefficient
        covariance, variance = _covariance_pass(Frame.of(drift, size), size, initial.covariance[:, :, 0], x, left)
        covariance = covariance[:, :, None]
    evidence = gaussian_log_density(x.v, precision) if request.return_evidence else None
    return Run(result.output, type(initial)(result.mean, covariance), precision, variance, evidence)


def _with_removal(drift: RowDrift, size: int, mean: Tensor, x: Inputs, gains: Gains, means: Means) -> MeanPass:
    """Two writes for each token: what the drift removes, and the token's own."""
    assert drift.removal is not None
    nothing = torch.zeros_like(x.q)
    log_decay = _in_turn(drift.log_decay, torch.zeros_like(drift.log_decay))
    key = _in_turn(drift.removal.key * (-drift.log_decay).exp(), nothing)
    direction = _in_turn(drift.removal.direction, x.k)[..., None, :]
    strength = _in_turn(torch.ones_like(gains.strength), gains.strength)
    both = Gains(direction, strength, strength, None)
    v, q = _in_turn(torch.zeros_like(x.v), x.v), _in_turn(nothing, x.q)
    result = means(RowDrift(log_decay), size, mean, q, key, v, both, return_error=False)
    return result._replace(output=result.output[:, 1::2])


def _in_turn(first: Tensor, second: Tensor) -> Tensor:
    """[B,T,...] twice → [B,2T,...], the tokens of both in turn."""
    return torch.stack((first, second), 2).flatten(1, 2)


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
