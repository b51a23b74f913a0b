r"""The mean, chunk by chunk, once the gains are known: the delta rule in WY form, and its additive special case.

Given write directions d_σ and strengths γ_σ (the Kalman gain is γ_σ d_σ), the errors of a chunk solve one unit
lower-triangular system, because each error sees the writes before it:

    E_τ + Σ_{σ<τ} (k_τᵀ φ_τσ d_σ) γ_σ E_σ = V_τ − k̃_τᵀ M₀          (k̃_τ = f_τ ⊙ k_τ)
    M_C = f_C ⊙ M₀ + Σ_σ φ_Cσ ⊙ d_σ γ_σ E_σᵀ,      O_τ = q̃_τᵀ M₀ + Σ_{σ≤τ} (q_τᵀ φ_τσ d_σ) γ_σ E_σ

Only the two products with M₀ and the exit are sequential over chunks. An additive write has no error to correct: E = V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.filter.torch.frame import Frame, cut, joined
from membydesign.products import product, solve_lower

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Gains, RowDrift


class MeanPass(NamedTuple):
    """Outputs [B,T,H,M], errors [B,T,H,M] if requested, and the mean at the end [B,H,D,M]."""

    output: Tensor
    error: Tensor | None
    mean: Tensor


Means = Callable[..., MeanPass]
"""An implementation of the mean pass: `mean_pass`, the same in native code, or flash-linear-attention's."""


def mean_pass(
    drift: RowDrift,
    size: int,
    mean: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gains: Gains,
    *,
    return_error: bool,
) -> MeanPass:
    """Run the mean over all chunks.

    Args:
        drift: how memory drifts.
        size: C.
        mean: at the start, [B,H,D,M].
        q: [B,T,H,D].
        k: [B,T,H,D]; None for additive writes, which correct no error.
        v: [B,T,H,M].
        gains: direction and strength of every write.
        return_error: also return the errors.
    """
    length, G = q.shape[1], gains.strength.shape[-1]
    # Everything is laid out as [B,H,G,K,C,·]; what the groups share has G = 1.
    strength = cut(gains.strength, size).movedim(-1, 2)
    shared = Frame.of(drift, size).for_groups()
    direction = shared.enter(cut(gains.direction, size).movedim(-2, 2))
    queries = shared.enter(cut(q, size)[:, :, None])
    values = cut(v, size).unflatten(-1, (G, -1)).movedim(-2, 2)
    reads = shared.product(queries, direction) * strength[..., None, :]
    writes = shared.to_end(direction) * strength[..., None]
    from_start = shared.over_chunk()[..., None]
    keys = inverse = None
    if k is not None:
        keys = shared.enter(cut(k, size)[:, :, None])
        system = (shared.product(keys, direction) * strength[..., None, :]).tril(-1)
        identity = torch.eye(size, dtype=q.dtype, device=q.device)
        inverse = solve_lower(identity + system, identity.expand_as(system), unitriangular=True)
        keys = shared.from_start(keys)

    starts, errors = [], []
    M = mean.unflatten(-1, (G, -1)).movedim(-2, 2)  # [B,H,G,D,M/G]
    for i in range(values.shape[3]):
        starts.append(M)
        error = values[:, :, :, i]
        if keys is not None and inverse is not None:
            error = product(inverse[:, :, :, i], error - product(keys[:, :, :, i], M))
        errors.append(error)
        M = shared.leave(from_start[:, :, :, i] * M + product(writes[:, :, :, i].mT, error), i)
    E, M0 = torch.stack(errors, 3), torch.stack(starts, 3)
    output = product(shared.from_start(queries), M0) + product(reads, E)
    return MeanPass(
        output=joined(output.movedim(2, -2).flatten(-2), length),
        error=joined(E.movedim(2, -2).flatten(-2), length) if return_error else None,
        mean=M.movedim(2, -2).flatten(-2),
    )
