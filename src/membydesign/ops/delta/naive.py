r"""The delta rule, one step: the Bayesian Layer with its predicted covariance reset to λ_t I.

    M̄_t = A_t M_{t-1}
    u_t  = λ_t k_t                               P̄_t := λ_t I, so the write lands along its raw key
    β_t  = 1 / (r_t² + λ_t ‖k_t‖²)
    M_t  = M̄_t + η_t k_t (v_t − M̄_tᵀ k_t)ᵀ     η_t = β_t λ_t

Proposition 2 of the paper. With `PerColumnReset`, λ_t and hence η_t have one entry for each value column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign.ops.gaussian import WriteEvent, predict, update

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.belief import Belief
    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs


def step(design: DesignModel, belief: Belief, x: Inputs) -> tuple[Belief, WriteEvent]:
    """One drift and one write, for `ObserveMemory` with `Reset` or `PerColumnReset`."""
    assert x.prior_variance is not None
    predicted = predict(design.transition, belief, x)
    squared_norm = x.k.square().sum(-1, keepdim=True)
    precision = 1 / (x.write_noise + x.prior_variance * squared_norm)
    u = (x.prior_variance[..., None] * x.k[..., None, :]).expand(*precision.shape, -1)
    write = WriteEvent(u, precision, error=x.v - predicted.read(x.k))
    return update(predicted, write), write


def read_variance(precision: Tensor, x: Inputs) -> Tensor:
    r"""What the reset belief claims just after its write: $q^\top(\lambda I - \beta u u^\top)q$, [B,H,G].

    Across the key it is $\lambda$ still, along the key $\lambda r^2\beta$: two positive terms, with no cancellation.
    """
    assert x.prior_variance is not None
    squared_norm = x.k.square().sum(-1, keepdim=True)
    along = (x.q * x.k).sum(-1, keepdim=True) / torch.where(squared_norm > 0, squared_norm, 1.0)
    across = (x.q - along * x.k).square().sum(-1, keepdim=True)
    return x.prior_variance * (across + along.square() * squared_norm * x.write_noise * precision)
