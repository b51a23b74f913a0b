r"""A covariance that keeps blocks on its diagonal: between `Diagonal` (blocks of one row) and `Dense` (one block).

The D rows of memory are cut into D/size blocks. Correlations inside a block are kept, those between blocks are
discarded after each write:

    P̄_t = A_t P_{t-1} A_tᵀ + Q_t                       predict, with P of D/size blocks
    P_t = the blocks of P̄_t − β_t u_t u_tᵀ             write, u_t = P̄_t k_t

That costs D·size numbers per head instead of D². What is kept is the best of its kind: among all block-diagonal
Gaussians it has the least KL divergence from the posterior before truncation.

You write what is kept before the first write (`initial`), the predicted covariance in any form you like (`predict`,
here a D×D matrix), its product with a key (`times`), what is kept after a write (`condition`), the `variance` of a
read, and how many numbers that makes (`elements`). A subclass of `Belief` says how to read what is kept. Filtering,
decoding, packing, layers, models and saving come for free.

One line buys speed: `gains = Covariance.gains_by_token` lets the covariance, which never sees values, pass over the
sequence first; the mean then runs in the chunked kernels: torch, native code, flash-linear-attention.

    design = DesignModel(DiagonalDecay(), ObserveMemory(), BlockDiagonal(size=4))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from membydesign import Belief, Covariance, Equation

if TYPE_CHECKING:
    from membydesign import Sizes, Step, WriteEvent


class BlockBelief(Belief):
    """A belief whose `covariance` is the blocks of P, [B,H,G,D/size,size,size]."""

    __slots__ = ()

    def variance(self, q: Tensor) -> Tensor:
        """The variance qᵀ P q of each coordinate of the read-out at q, [B,H,D]: [B,H,G]."""
        return read_variance(self.covariance, q)

    def dense_covariance(self) -> Tensor:
        """P as matrices [B,H,G,D,D]."""
        return assemble(self.covariance)


def assemble(blocks: Tensor) -> Tensor:
    """Put blocks, [...,n,size,size], on the diagonal of matrices of zeros, [...,n·size,n·size]."""
    matrices = torch.diag_embed(blocks.movedim(-3, -1))  # [...,size,size,n,n]
    return matrices.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).flatten(-4, -3).flatten(-2, -1)


def extract(matrices: Tensor, size: int) -> Tensor:
    """Take the diagonal blocks, [...,n,size,size], of matrices [...,n·size,n·size]."""
    cut = matrices.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [...,n,size,n,size]
    return cut.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def read_variance(blocks: Tensor, q: Tensor) -> Tensor:
    """Σ over blocks of qᵀ P q, or zero where rounding makes it negative; q [B,H,D]."""
    q = q.unflatten(-1, blocks.shape[-3:-1])[:, :, None]  # [B,H,1,D/size,size]
    return (blocks * (q[..., :, None] * q[..., None, :])).sum((-3, -2, -1)).clamp_min(0)


@dataclass(frozen=True)
class BlockDiagonal(Covariance):
    r"""Blocks of `size` rows survive each update: $P_t = \mathrm{blocks}(\bar P_t - \beta_t u_t u_t^\top)$.

    Args:
        size: rows of a block; D must be divisible by it.
        prior: the variance of every direction before anything is written.

    State: G·D·size elements, [B,H,G,D/size,size,size].
    """

    size: int = 2
    prior: float = 1.0
    exactness = "block-diagonal truncation"
    belief = BlockBelief
    gains = Covariance.gains_by_token

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"BlockDiagonal(size): expected a whole number of at least 1, got {self.size!r}")

    def refuse_key_size(self, D: int) -> str | None:
        return f"D divisible by the block size {self.size}" if D % self.size else None

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
        shape = (sizes.batch, sizes.heads, groups, sizes.D // self.size, self.size, self.size)
        return (self.prior * torch.eye(self.size, dtype=dtype, device=device)).expand(shape).clone()

    def predict(self, kept: Tensor, drifted: Callable[[Tensor], Tensor], step: Step) -> Tensor:
        return drifted(assemble(kept))

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        return (predicted * k[:, :, None, None, :]).sum(-1)

    def condition(self, predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
        u, precision = event.warped_key, event.precision[..., None, None]
        return extract(predicted - precision * (u[..., :, None] * u[..., None, :]), self.size)

    def variance(self, kept: Tensor, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        return read_variance(kept, q)

    def elements(self, D: int, groups: int) -> int:
        return groups * D * self.size

    @property
    def equations(self) -> tuple[Equation, ...]:
        kept = r"P_t = \mathrm{blocks}(\bar{P}_t - \beta_t u_t u_t^\top)"
        return (
            Equation("P̄_t = A_t P_{t-1} A_tᵀ + Q_t", r"\bar{P}_t = A_t P_{t-1} A_t^\top + Q_t"),
            Equation("P_t = the blocks of P̄_t − β_t u_t u_tᵀ", kept),
        )
