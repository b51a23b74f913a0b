r"""Evidence that adds up, on the chunked mean pass: every `AdditiveDesign`, such as counts and categories.

In deviation from the point (A₀, n₀) where forgetting leads, table and totals are additive writes under a shared decay:

    A_t − A₀ = δ_t (A_{t-1} − A₀) + k_t v_tᵀ,      n_t − n₀ = δ_t (n_{t-1} − n₀) + w(v_t) k_t

The totals come first, by the same pass with one row, the key 1 and w(v) k as values. The read is then linear in the
table, at a query that is known in advance: y_t = Σ_i (q_i/n_i) A_i.

The density of a write is not linear in the table: it needs a Γ function of every entry at every token. If it is
requested, chunks of tables are formed, [B,H,C,D,M], so that a chunk is a few large operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign import design as designs
from membydesign.design import Gains, RowDrift
from membydesign.filter.inputs import Run
from membydesign.filter.torch.mean_pass import mean_pass
from membydesign.products import product

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import AdditiveDesign, Design, Sums
    from membydesign.filter.inputs import Inputs, Request
    from membydesign.filter.torch.mean_pass import MeanPass, Means

NAME, BACKEND = "torch, sums in chunks", "torch"
TABLES_AT_ONCE = 16
"""Tokens whose tables are formed together, for the evidence of writes."""


class Shares(NamedTuple):
    """Queries shared out by what every slot has seen.

    Attributes:
        weights: q_t/n_t, [B,T,H,D].
        sum: of the weights, [B,T,H].
        seen: n_t, [B,T,H,D], if requested.
        deviation: n − n₀ at the end, [B,H,D].
    """

    weights: Tensor
    sum: Tensor
    seen: Tensor | None
    deviation: Tensor


SharesOf = Callable[..., Shares]
"""Computes the shares of a sequence: `shares_by` a mean pass, or the same in native code."""


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    del request
    if not isinstance(design, designs.AdditiveDesign):
        return f"for {design.title}, since this kernel adds up the sums of an AdditiveDesign"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in torch."""
    assert isinstance(design, designs.AdditiveDesign)
    size = request.tokens_in_chunk(64)
    return run_with(design, request, mean_pass, size, partial(shares_by, mean_pass, size))


def run_with(design: AdditiveDesign, request: Request, means: Means, size: int, shares_of: SharesOf) -> Run:
    """Filter [B,T] with any implementation of the passes.

    Args:
        design: the assumptions.
        request: what to compute.
        means: the mean pass, of the tables.
        size: tokens in a chunk.
        shares_of: computes the totals, and the queries for the tables.
    """
    x = request.x
    table, total = design.sums(request.initial)
    to_table, to_total = design.resting(x.v.shape[-1])
    log_decay, weight = x.parameters["log_decay"], design.weight(x.v)

    def read(weights: Tensor, sum_of_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_i w_i A_i at every token, and A − A₀ at the end."""
        result = additive_pass(means, size, table - to_table, log_decay, weights, x.k, x.v)
        if to_table == 0:
            return result.output, result.mean
        return result.output + (to_table * sum_of_weights)[..., None], result.mean

    shares = shares_of(total - to_total, to_total, x.q, x.k, weight, log_decay, return_seen=request.return_variance)
    output, deviation = read(shares.weights, shares.sum)
    state = design.state_of(designs.Sums(deviation + to_table, shares.deviation + to_total))
    weights = None if shares.seen is None else design.variance_weights(shares.seen, x.q)
    variance = None if weights is None else read(weights, weights.sum(-1))[0]
    evidence = None
    if request.return_evidence or (request.return_variance and variance is None):
        start = designs.Sums(table - to_table, total - to_total)
        of_tables, evidence = _by_tables(design, request, start)
        variance = of_tables if variance is None else variance
    return Run(output, state, None, variance, evidence)


def additive_pass(
    means: Means, size: int, start: Tensor, log_decay: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> MeanPass:
    """A mean pass that adds k_t v_tᵀ under a decay that all rows share, [B,T,H]."""
    one = k.new_ones(()).expand(*k.shape[:-1], 1)
    gains = Gains(k[..., None, :], one, one, None)
    return means(RowDrift(log_decay[..., None]), size, start, q, None, v, gains, return_error=False)


def shares_by(
    means: Means,
    size: int,
    start: Tensor,
    resting: float,
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    *,
    return_seen: bool,
) -> Shares:
    """The totals as a memory with one row, whose key is always 1.

    Args:
        means: the mean pass.
        size: tokens in a chunk.
        start: n − n₀ before the first token, [B,H,D].
        resting: n₀.
        q: [B,T,H,D].
        k: [B,T,H,D].
        weight: w(v), how much a unit of key adds, [B,T,H].
        log_decay: [B,T,H].
        return_seen: also return n.
    """
    one = k.new_ones(()).expand(*k.shape[:-1], 1)
    totals = additive_pass(means, size, start[:, :, None], log_decay, one, one, weight[..., None] * k)
    seen = totals.output + resting
    weights = q / seen
    return Shares(weights, weights.sum(-1), seen if return_seen else None, totals.mean[:, :, 0])


def _by_tables(design: AdditiveDesign, request: Request, deviation: Sums) -> tuple[Tensor | None, Tensor | None]:
    """Variances [B,T,H,M] and log densities [B,T,H], where requested, from the sums before and after every write."""
    variances, densities = [], []
    for start in range(0, request.x.q.shape[1], TABLES_AT_ONCE):
        x = request.x.between(start, start + TABLES_AT_ONCE)
        before, after, deviation = _sums_of_chunk(design, x, deviation)
        q, k, v = (y.transpose(1, 2) for y in x[:3])
        if request.return_variance:
            variances.append(design.variance(after, q).transpose(1, 2))
        if request.return_evidence:
            densities.append(design.log_density(before, k, v).transpose(1, 2))
    return (torch.cat(variances, 1) if variances else None), (torch.cat(densities, 1) if densities else None)


def _sums_of_chunk(design: AdditiveDesign, x: Inputs, deviation: Sums) -> tuple[Sums, Sums, Sums]:
    """The sums before and after every write of a chunk, [B,H,C,D,M] and [B,H,C,D], and the deviation at its end."""
    k, v = x.k.transpose(1, 2), x.v.transpose(1, 2)  # [B,H,C,·]
    log_decay = x.parameters["log_decay"].transpose(1, 2).cumsum(-1)
    resting = design.resting(v.shape[-1])
    decayed = (log_decay[..., :, None] - log_decay[..., None, :]).clamp_max(0).exp().tril(-1)
    before, after, last = [], [], []
    for start, added, to in zip(
        deviation, (k[..., :, None] * v[..., None, :], design.weight(v)[..., None] * k), resting, strict=True
    ):
        own_axes = (..., *[None] * (added.ndim - 3))
        inside = product(decayed, added.flatten(3)).view_as(added)
        predicted = log_decay.exp()[own_axes] * start[:, :, None] + inside
        before.append(predicted + to)
        after.append(predicted + added + to)
        last.append((predicted + added)[:, :, -1])
    return designs.Sums(*before), designs.Sums(*after), designs.Sums(*last)
