r"""Gains of a covariance that forgets in its own way, chunk by chunk, then the mean.

    P̄_t = s_t A_t P_{t-1} A_tᵀ + λ_t (I − s_t A_t A_tᵀ)

is the covariance of a memory that drifts by Ã_t = √s_t A_t, with process noise of its own for every row. So the chunks
of `dense.py` run as they are, without values and with decays f̃_τ = Π √s a. From what they leave behind, the warped keys
u_τ = P̄_τ k_τ of a chunk follow at once. With G = L Lᵀ, J_σ = f̃_σ ⊙ P₀ k̃_σ + n_σ ⊙ k_σ, and N = diag(L) L⁻¹,

    u_τ = Σ_{σ≤τ} N_τσ φ̃_τσ ⊙ J_σ,        β_τ = 1/L_ττ²

A covariance that grows, s_t > 1, is kept in units that grow with it, P̂_τ = d_τ P̄_τ with d_τ = Π 1/s. In these a
write has the noise d_τ r_τ², and no exponent is positive.

The mean, which drifts by A_t, then runs with these gains (`mean_pass.py`). A gradient for s_t passes through √s_t,
which divides by it, so sequences with a stronger change than `STRONGEST` at any token are filtered token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.design import DesignModel, ForgettingCovariance, Gains, RowDrift
from membydesign.filter.linear import why_not_two_pass
from membydesign.filter.torch import two_pass
from membydesign.filter.torch.dense import LONGEST, Chunks, Noise, precision_of, run_pass, too_sure
from membydesign.filter.torch.frame import Frame, accumulate, cut, joined
from membydesign.filter.torch.mean_pass import mean_pass
from membydesign.filter.transforms import hidden, values
from membydesign.products import product, solve_lower
from membydesign.state import map_state

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, Forgetting, SequenceDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "torch, gains of a forgetting covariance in chunks, then chunks of the mean", "torch"

STRONGEST = 16.0
"""The strongest change of the covariance at one token, by this factor or its inverse, that chunks have."""

MOST_GROWTH = 2.0**20
"""The most that the covariance may grow within a chunk."""


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    reason = why_not_forgetting(design, request)
    if reason is not None:
        return reason
    assert isinstance(design, DesignModel)
    assert isinstance(design.covariance, ForgettingCovariance)
    scale = design.covariance.forgetting(request.x.parameters).scale
    if hidden(scale):
        return "where torch hides numbers, since its chunks need to know how strongly the covariance forgets"
    scale = values(scale)
    if scale.numel() and not bool(((scale >= 1 / STRONGEST) & (scale <= STRONGEST)).all()):
        return f"for tokens that change the covariance by more than a factor of {STRONGEST:g}"
    if scale.numel() and scale.max().item() ** _size(request) > MOST_GROWTH:
        return f"for covariances that may grow by more than a factor of {MOST_GROWTH:g} in a chunk"
    return None


def _size(request: Request) -> int:
    return request.tokens_in_chunk(min(LONGEST, max(16, request.x.q.shape[-1])))


def why_not_forgetting(design: Design, request: Request) -> str | None:
    """Why no kernel computes the gains of this design in chunks; None if one may."""
    if not isinstance(design, DesignModel) or not isinstance(design.covariance, ForgettingCovariance):
        return f"for {design.title}, since this kernel is for covariances that forget (ForgettingCovariance)"
    return why_not_two_pass(design, request.x)


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in torch."""
    assert isinstance(design, DesignModel)
    covariance = design.covariance
    assert isinstance(covariance, ForgettingCovariance)
    size = _size(request)

    def gains_of(start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        return gains(start, k, drift, q, covariance.forgetting(drift.parameters), size)

    return two_pass.run_with(design, request, mean_pass, 64, gains_of)


def gains(start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None, forgetting: Forgetting, size: int) -> Gains:
    """The gains of all tokens.

    Args:
        start: the covariance before the first token, [B,H,G,D,D].
        k: keys, [B,T,H,D].
        drift: of the memory, and the noise of writes.
        q: queries whose variances to return too, or None.
        forgetting: how the covariance drifts besides, [B,T,H].
        size: tokens in a chunk.
    """
    length = k.shape[1]
    cuts = _Cut.of(k, drift, q, forgetting, size)
    frame, noisy_key, write_noise = cuts.frame, cuts.noise.times(cuts.k), cuts.write_noise
    built_up = frame.product(cuts.k, noisy_key)
    own = (built_up + built_up.tril(-1).mT)[:, :, None] + torch.diag_embed(write_noise)
    D = k.shape[-1]
    keys = frame.from_start(cuts.k)
    P = (start + start.mT) / 2
    M = P.new_zeros(*P.shape[:-1], 0)  # no values, so no mean
    chunks = Chunks(
        keys=keys,
        own=own,
        exits=frame.to_end(noisy_key) * cuts.leaving[..., None, None],
        values=own.new_zeros(*own.shape[:-1], 0),
        decay=frame.over_chunk() * cuts.leaving[..., None],
        noise=cuts.noise.at_end(D) * cuts.leaving[..., None, None].square(),
        cos=None if frame.cos is None else frame.cos[..., -1, :],
        sin=None if frame.sin is None else frame.sin[..., -1, :],
    )
    _, P, _, P0, factor, _, failed = run_pass(M, P, chunks)
    if too_sure(factor, write_noise):
        rows = map_state(lambda t: t.double(), drift.rows)
        forgetting = map_state(lambda t: t.double(), forgetting)
        drift = drift._replace(rows=rows, write_noise=drift.write_noise.double())
        queries = None if q is None else q.double()
        result = gains(start.double(), k.double(), drift, queries, forgetting, size)
        return map_state(lambda t: t.to(k.dtype), result)

    grouped = frame.for_groups()
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
    inverse = solve_lower(factor, identity)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    keys = keys[:, :, None]
    entered = grouped.from_start(product(keys, P0)) + noisy_key[:, :, None]
    warped_key = grouped.leave_each(grouped.weighted(pivots[..., None] * inverse, entered))
    unit = cuts.unit[:, :, None]
    precision = joined((precision_of(factor, failed) * unit).movedim(2, -1), length)
    variance = None
    if cuts.q is not None:
        queries = frame.from_start(cuts.q)[:, :, None]
        reads = product(queries, P0)
        across = (product(reads, keys.mT) + frame.product(cuts.q, noisy_key)[:, :, None]).tril()
        weights = product(across, inverse.mT).tril()
        drifted = (cuts.noise.times(cuts.q) * cuts.q).sum(-1)[:, :, None]
        variance = ((reads * queries).sum(-1) + drifted - weights.square().sum(-1)) / unit
        variance = joined(variance.movedim(2, -1), length).clamp_min(0)
    direction = joined((warped_key / unit[..., None]).movedim(2, -2), length)
    return Gains(direction, precision, precision, P, variance)


class _Cut(NamedTuple):
    """A sequence in chunks, in the frame of the covariance."""

    frame: Frame
    k: Tensor  # [B,H,K,C,D]
    q: Tensor | None
    noise: Noise  # in units of the chunk, as write_noise
    write_noise: Tensor  # [B,H,G,K,C]
    unit: Tensor  # d, [B,H,K,C]

    @property
    def leaving(self) -> Tensor:
        """1/√d at the chunks' ends, [B,H,K]: what takes deviations back to the units of memory."""
        return self.unit[..., -1].rsqrt()

    @staticmethod
    def of(k: Tensor, drift: SequenceDrift, q: Tensor | None, forgetting: Forgetting, size: int) -> _Cut:
        """Cut everything; tokens that fill up the last chunk leave the covariance as it is."""
        scale, prior_variance = forgetting
        rows, log_scale = drift.rows.of_rows(), scale.log()
        fading, growing = torch.where(scale > 1, 0.0, log_scale), torch.where(scale > 1, log_scale, 0.0)
        decay = rows + 0.5 * fading[..., None]
        frame = Frame.of(RowDrift(decay, drift.rows.angle), size)
        if frame.cos is not None and frame.log_decay.shape[-1] == 1:
            frame = frame._replace(log_decay=frame.log_decay.expand(*frame.log_decay.shape[:-1], k.shape[-1]))
        unit = (-cut(growing, size).cumsum(-1)).exp()
        diagonal = torch.zeros_like(frame.log_decay)
        if prior_variance is not None:
            # λ(1 − s a²), without rounding what a slow decay leaves
            faded = (1 - scale)[..., None] - scale[..., None] * torch.expm1(2 * rows)
            entering = cut(prior_variance[..., None] * faded, size) * unit[..., None]
            diagonal = accumulate(entering.expand_as(frame.log_decay), frame.log_decay)
        write_noise = cut(drift.write_noise, size, fill=1.0).movedim(-1, 2) * unit[:, :, None]
        queries = None if q is None else frame.enter(cut(q, size))
        return _Cut(frame, frame.enter(cut(k, size)), queries, Noise(diagonal, None), write_noise, unit)
