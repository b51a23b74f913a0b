r"""The Bayesian Layer, one step: the specification of everything in this folder.

    M̄_t = A_t M_{t-1}                          predicted mean
    P̄_t = A_t P_{t-1} A_tᵀ + ℓ_t² N            predicted covariance
    u_t  = P̄_t k_t                              uncertainty-warped key
    β_t  = 1 / (r_t² + k_tᵀ u_t)                innovation precision
    M_t  = M̄_t + β_t u_t (v_t − M̄_tᵀ k_t)ᵀ     mean update
    P_t  = P̄_t − β_t u_t u_tᵀ                   covariance update

Proposition 1 of the paper, for each noise group. `Diagonal` keeps the diagonal of P_t and discards the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.belief import Belief
from membydesign.design import Diagonal
from membydesign.ops.gaussian import WriteEvent, predict, update
from membydesign.products import product

if TYPE_CHECKING:
    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs


def step(design: DesignModel, belief: Belief, x: Inputs) -> tuple[Belief, WriteEvent]:
    """One predict and one write, for `ObserveMemory` with a propagated covariance (`Dense` or `Diagonal`)."""
    predicted = predict(design.transition, belief, x)
    k = x.k[:, :, None]
    u = product(predicted.dense_covariance(), k[..., None])[..., 0]
    precision = 1 / (x.write_noise + (k * u).sum(-1))
    write = WriteEvent(u, precision, error=x.v - predicted.read(x.k))
    posterior = update(predicted, write)
    if isinstance(design.covariance, Diagonal):
        posterior = Belief(posterior.mean, posterior.dense_covariance().diagonal(dim1=-2, dim2=-1))
    return posterior, write
