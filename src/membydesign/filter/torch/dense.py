r"""The exact filter of the Bayesian Layer, chunk by chunk: condition on C observations at once.

From the belief (M₀, P₀) at a chunk's start, with k̃ = f ⊙ k, q̃ = f ⊙ q, and n_σ the variance that process noise alone
has built up by σ (n_σ k_σ is written `noisy_key`), for σ ≤ τ:

    G_τσ = k̃_τᵀ P₀ k̃_σ + k_τᵀ φ_τσ n_σ k_σ + r_τ² [τ=σ]       covariance of the chunk's observations
    H_τσ = q̃_τᵀ P₀ k̃_σ + q_τᵀ φ_τσ n_σ k_σ                     of reads with observations
    J_σ  = f_C ⊙ P₀ k̃_σ + φ_Cσ ⊙ n_σ k_σ                        of the exit state with observations
    G = L Lᵀ,   E = L⁻¹ (V − K̃ M₀),   W = tril(H) L⁻ᵀ,   X = L⁻¹ J
    O = Q̃ M₀ + W E,     M_C = f_C ⊙ M₀ + Xᵀ E,     P_C = f_C P₀ f_C + n_C − Xᵀ X
    variance = q̃ᵀ P₀ q̃ + qᵀ n q − Σ_σ W²,     precision β = 1/L_ττ²

1. What does not depend on the belief is computed for all chunks at once.
2. The belief is passed from chunk to chunk (`_Pass`); its backward keeps only the beliefs at the boundaries.
3. Outputs of all chunks at once, from the beliefs at their starts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.filter import transforms
from membydesign.filter.inputs import Run
from membydesign.filter.linear import dense_problem, why_not_dense
from membydesign.filter.torch.frame import Frame, accumulate, cut, joined, turn_rows
from membydesign.products import cholesky, full_precision, product, solve_lower
from membydesign.state import map_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.design import Design, RowDrift, RowNoise
    from membydesign.filter.inputs import Request
    from membydesign.filter.linear import DenseInputs


SURE = 16
"""A variance along a key this many times its write noise is too much for float32 in chunks: R is made of differences of
almost equal numbers, which cost more digits than the loop loses. Such a sequence is filtered in float64."""


class Noise(NamedTuple):
    """Process noise built up inside a chunk, in its frame: diagonal, or a symmetric 2×2 block for each pair of rows.

    Attributes:
        diagonal: [B,H,K,C,D] (or [...,1], shared by all rows).
        across: the off-diagonal entry of each pair, [B,H,K,C,D/2], or None.
    """

    diagonal: Tensor
    across: Tensor | None

    def times(self, x: Tensor) -> Tensor:
        """N x, [B,H,K,C,D]."""
        product = self.diagonal * x
        if self.across is None:
            return product
        swapped = torch.stack((self.across * x[..., 1::2], self.across * x[..., 0::2]), -1)
        return product + swapped.flatten(-2)

    def at_end(self, D: int) -> Tensor:
        """N at the chunks' ends, as matrices [B,H,K,D,D]."""
        matrix = torch.diag_embed(self.diagonal[..., -1, :].expand(*self.diagonal.shape[:3], D))
        if self.across is None:
            return matrix
        upper = torch.stack((self.across[..., -1, :], torch.zeros_like(self.across[..., -1, :])), -1).flatten(-2)
        above = torch.diag_embed(upper[..., :-1], offset=1)
        return matrix + above + above.mT


def accumulated_noise(frame: Frame, drift: RowDrift, noise: RowNoise, size: int) -> Noise:
    """What process noise has built up by every token, in chunks of `size` tokens."""
    if noise.stationary:  # as much in both rows of a pair, so that no turn matters
        entering = cut(noise.entering(drift), size)
        return Noise(accumulate(entering, frame.log_decay), None)
    entering, rows = cut(noise.variance, size)[..., None], noise.rows
    if frame.cos is None or frame.sin is None:
        log_decay = frame.log_decay if rows.shape[0] == 1 else frame.log_decay.expand(*entering.shape[:-1], len(rows))
        return Noise(accumulate((entering * rows).expand_as(log_decay), log_decay), None)
    real, imaginary = rows[0::2], rows[1::2] if len(rows) > 1 else rows
    # R(−Θ) diag(real, imaginary) R(−Θ)ᵀ, entry by entry
    cos, sin, pairs = frame.cos, frame.sin, frame.log_decay[..., 0::2]
    first = accumulate(entering * (cos**2 * real + sin**2 * imaginary), pairs)
    second = accumulate(entering * (sin**2 * real + cos**2 * imaginary), pairs)
    across = accumulate(entering * cos * sin * (imaginary - real), pairs)
    return Noise(torch.stack((first, second), -1).flatten(-2), across)


class Chunks(NamedTuple):
    """What the pass needs of every chunk, chunk by chunk along the axis K (2 or 3)."""

    keys: Tensor  # K̃, [B,H,K,C,D]
    own: Tensor  # G without P₀: noise built up, and r², [B,H,G,K,C,C]
    exits: Tensor  # J without P₀, [B,H,K,C,D]
    values: Tensor  # [B,H,G,K,C,M/G]
    decay: Tensor  # f_C, [B,H,K,R]
    noise: Tensor  # n_C, [B,H,K,D,D]
    cos: Tensor | None  # of Θ_C, [B,H,K,D/2]
    sin: Tensor | None

    def at(self, i: int) -> Chunks:
        """The chunk i, without the axis K."""
        grouped = {"own", "values"}
        return Chunks._make(
            None if x is None else (x[:, :, :, i] if name in grouped else x[:, :, i])
            for name, x in self._asdict().items()
        )


class Passed(NamedTuple):
    """What one chunk hands on and leaves behind."""

    mean: Tensor  # at its end, [B,H,G,D,M/G]
    covariance: Tensor  # at its end, [B,H,G,D,D]
    factor: Tensor  # L, [B,H,G,C,C]
    error: Tensor  # E, whitened, [B,H,G,C,M/G]
    failed: Tensor  # the order of the first minor that is not positive, or 0, [B,H,G]


def pass_chunk(M: Tensor, P: Tensor, x: Chunks) -> Passed:
    """One chunk of the filter, from the belief (M [B,H,G,D,M/G], P [B,H,G,D,D]) at its start."""
    keys, f = x.keys[:, :, None], x.decay[:, :, None]
    warped = product(keys, P)
    observed = product(warped, keys.mT) + x.own
    factor, failed = cholesky(observed)
    right = torch.cat((warped * f[..., None, :] + x.exits[:, :, None], x.values - product(keys, M)), -1)
    exits, error = solve_lower(factor, right).split((P.shape[-1], M.shape[-1]), -1)
    M = f[..., :, None] * M + product(exits.mT, error)
    P = f[..., :, None] * f[..., None, :] * P + x.noise[:, :, None] - product(exits.mT, exits)
    if x.cos is not None and x.sin is not None:
        cos, sin = x.cos[:, :, None, None], x.sin[:, :, None, None]
        M = turn_rows(M.mT, cos, sin).mT
        P = turn_rows(turn_rows(P, cos, sin).mT, cos, sin)
    return Passed(M, (P + P.mT) / 2, factor, error, failed)


def pass_all(M: Tensor, P: Tensor, x: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The belief through all chunks: at the end, at all starts, and what every chunk left behind."""
    starts_M, starts_P, left = [], [], []
    for i in range(x.keys.shape[2]):
        starts_M.append(M)
        starts_P.append(P)
        M, P, *behind = pass_chunk(M, P, x.at(i))
        left.append(behind)
    factor, error, failed = (torch.stack(parts, 3) for parts in zip(*left, strict=True))
    return M, P, torch.stack(starts_M, 3), torch.stack(starts_P, 3), factor, error, failed


class _Pass(torch.autograd.Function):
    """`pass_all`, of which only the beliefs at the boundaries are kept; backward computes the inside anew.

    Both directions hold full precision once, for all products in them.
    """

    @staticmethod
    def forward(ctx: Any, M: Tensor, P: Tensor, *chunks: Tensor | None) -> tuple[Tensor, ...]:
        with full_precision(P.device.type):
            result = pass_all(M, P, Chunks._make(chunks))
        ctx.save_for_backward(M, P, *result[2:4], *chunks)
        ctx.mark_non_differentiable(result[-1])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        M, P, M0, P0, *chunks = ctx.saved_tensors
        if torch.is_grad_enabled() or transforms.active():  # create_graph=True, or gradients that torch.vmap maps
            return _followed_gradients((M, P, *chunks), grads[:-1])
        dM, dP, dM0, dP0, dfactor, derror, _ = grads
        x = Chunks._make(chunks)
        pieces: list[list[Tensor]] = []
        with full_precision(P0.device.type):
            for i in reversed(range(x.keys.shape[2])):
                with torch.enable_grad():
                    inputs = [t.detach().requires_grad_() for t in (M0[:, :, :, i], P0[:, :, :, i])]
                    inputs += [t.detach().requires_grad_() for t in x.at(i) if t is not None]
                    own = iter(inputs[2:])
                    again = pass_chunk(inputs[0], inputs[1], Chunks._make(None if t is None else next(own) for t in x))
                upstream = (dM, dP, dfactor[:, :, :, i], derror[:, :, :, i])
                dM, dP, *rest = torch.autograd.grad(again[:4], inputs, upstream)
                dM, dP = dM + dM0[:, :, :, i], dP + dP0[:, :, :, i]
                pieces.append(list(rest))
        stacked = iter(zip(*reversed(pieces), strict=True))
        result = []
        for name, t in x._asdict().items():
            result.append(None if t is None else torch.stack(next(stacked), 3 if name in ("own", "values") else 2))
        return dM, dP, *result


def _followed_gradients(inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of `pass_all` by torch's own operations, in which all of the pass is kept."""
    with torch.enable_grad():
        own = [None if t is None else t.view_as(t) for t in inputs]  # apart from one another, whatever each was made of
        M, P, *chunks = own
        assert M is not None
        assert P is not None
        *result, _ = pass_all(M, P, Chunks._make(chunks))
    leaves = [t for t in own if t is not None and t.requires_grad]
    outputs = [y for y in result if y.requires_grad]
    upstream = [g for y, g in zip(result, grads, strict=True) if y.requires_grad]
    again = torch.is_grad_enabled()
    gradients = iter(torch.autograd.grad(outputs, leaves, upstream, create_graph=again, allow_unused=True))
    return tuple(next(gradients) if t is not None and t.requires_grad else None for t in own)


def run_pass(M: Tensor, P: Tensor, x: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`pass_all` with a backward that keeps little."""
    # torch.compile's own planner decides what to keep; transforms and tangents have no use for a written backward.
    if torch.compiler.is_compiling() or transforms.transformed():
        return pass_all(M, P, x)
    return _Pass.apply(M, P, *x)


class Reads(NamedTuple):
    """What the queries of all chunks read."""

    output: Tensor  # O, [B,H,G,K,C,M/G]
    reads: Tensor  # Q̃ P₀, [B,H,G,K,C,D]
    weights: Tensor  # W, [B,H,G,K,C,C]


def read_chunks(
    queries: Tensor, keys: Tensor, cross: Tensor, M0: Tensor, P0: Tensor, factor: Tensor, error: Tensor
) -> Reads:
    """Read all chunks at once from the beliefs at their starts.

    Args:
        queries: Q̃, [B,H,1,K,C,D].
        keys: K̃, likewise.
        cross: H without P₀, [B,H,1,K,C,C].
        M0: the means at the starts, [B,H,G,K,D,M/G].
        P0: their covariances, [B,H,G,K,D,D].
        factor: L, [B,H,G,K,C,C].
        error: E, [B,H,G,K,C,M/G].
    """
    reads = product(queries, P0)
    across = (product(reads, keys.mT) + cross).tril()
    weights = solve_lower(factor, across.mT).mT.tril()
    return Reads(product(queries, M0) + product(weights, error), reads, weights)


def filter_chunk(
    drift: RowDrift,
    noise: RowNoise,
    initial: Belief,
    x: DenseInputs,
    size: int,
    *,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`ObserveMemory` with `Dense`, over [B,T]."""
    length, D, G = x.q.shape[1], x.q.shape[-1], x.write_noise.shape[-1]

    # 1. For all chunks at once
    frame = Frame.of(drift, size)
    k, q = frame.enter(cut(x.k, size)), frame.enter(cut(x.q, size))
    added = accumulated_noise(frame, drift, noise, size)
    noisy_key = added.times(k)
    write_noise = cut(x.write_noise, size, fill=1.0).movedim(-1, 2)
    built_up = frame.product(k, noisy_key)
    own = (built_up + built_up.tril(-1).mT)[:, :, None] + torch.diag_embed(write_noise)
    chunks = Chunks(
        keys=frame.from_start(k),
        own=own,
        exits=frame.to_end(noisy_key),
        values=cut(x.v, size).unflatten(-1, (G, -1)).movedim(-2, 2),
        decay=frame.over_chunk(),
        noise=added.at_end(D),
        cos=None if frame.cos is None else frame.cos[..., -1, :],
        sin=None if frame.sin is None else frame.sin[..., -1, :],
    )

    # 2. Chunk after chunk
    M = initial.mean.unflatten(-1, (G, -1)).movedim(-2, 2)
    P = (initial.covariance + initial.covariance.mT) / 2
    M, P, M0, P0, factor, error, failed = run_pass(M, P, chunks)

    if too_sure(factor, write_noise):
        run = filter_chunk(
            map_state(lambda t: t.double(), drift),
            noise.map(lambda t: t.double()),
            initial.map(lambda t: t.double()),
            x.map(lambda t: t.double()),
            size,
            return_variance=return_variance,
            return_evidence=return_evidence,
        )
        return map_state(lambda t: t.to(x.q.dtype), run)

    # 3. For all chunks at once
    queries, keys = frame.from_start(q)[:, :, None], chunks.keys[:, :, None]
    cross = frame.product(q, noisy_key)[:, :, None]
    output, reads, weights = read_chunks(queries, keys, cross, M0, P0, factor, error)
    output = joined(output.movedim(2, -2).flatten(-2), length)
    precision = joined(precision_of(factor, failed).movedim(2, -1), length)
    variance = evidence = squares = None
    if return_variance:
        drifted = (added.times(q) * q).sum(-1)[:, :, None]
        variance = (reads * queries).sum(-1) + drifted - weights.square().sum(-1)
        variance = joined(variance.movedim(2, -1), length).clamp_min(0)
    if return_evidence:
        columns = error.shape[-1]
        pivots = factor.diagonal(dim1=-2, dim2=-1)
        of_errors = error.square().sum(-1)
        density = columns * ((2 * math.pi) ** 0.5 * pivots).log() + 0.5 * of_errors
        evidence, squares = -joined(density.sum(2), length), joined(of_errors.movedim(2, -1), length)
    return Run(output, Belief(M.movedim(2, -2).flatten(-2), P), precision, variance, evidence, squares)


NAME, BACKEND = "torch, dense covariance in chunks", "torch"

LONGEST = 64
"""The most tokens in a chunk by default; never more than D of them (or 16), beyond which rounding grows."""


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    return why_not_dense(design, request.x)


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in torch."""
    drift, noise, x = dense_problem(design, request.x)
    size = request.tokens_in_chunk(min(LONGEST, max(16, x.q.shape[-1])))
    returns = {"return_variance": request.return_variance, "return_evidence": request.return_evidence}
    return filter_chunk(drift, noise, request.initial, x, size, **returns)


def too_sure(factor: Tensor, write_noise: Tensor) -> bool:
    """Whether a float32 filter met writes so much surer than memory that conditioning on many at once costs digits."""
    if factor.dtype != torch.float32 or factor.device.type == "mps" or transforms.hidden(factor):
        return False
    variances = factor.square().sum(-1)  # the diagonal of G
    return bool(transforms.values(variances > SURE * write_noise).any())


def precision_of(factor: Tensor, failed: Tensor) -> Tensor:
    """β = 1/L_ττ², [B,H,G,K,C], and −1 where the factorisation met a direction that is not positive."""
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    position = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return torch.where(position == failed[..., None], -1.0, 1 / pivots.square())
