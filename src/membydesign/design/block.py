r"""The block-diagonal covariance: correlations between rows of different blocks are discarded after each write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.belief import BlockBelief, from_blocks
from membydesign.design.covariance import (
    PREDICTED,
    Covariance,
    check_prior,
    check_whole_number,
    matrix_flaws,
    times_groups,
    updated,
)
from membydesign.design.schema import Equation
from membydesign.design.sequence_drift import Drift, Gains, SequenceDrift
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design.protocol import Flaw, Step
    from membydesign.design.sources import Source
    from membydesign.design.write import WriteEvent
    from membydesign.state import Sizes


@final
@dataclass(frozen=True)
class Block(Covariance):
    r"""Blocks of `size` rows survive each update; correlations between rows of different blocks are discarded.

    $$\bar P_t = A_t P_{t-1} A_t^\top + \ell_t^2 N, \qquad
    P_t = \mathrm{blocks}(\bar P_t - \beta_t u_t u_t^\top), \qquad P_0 = p_0 I$$

    Between `Diagonal` (blocks of one row) and `Dense` (one block). Among all block-diagonal Gaussians, what is kept has
    the least KL divergence from the posterior before truncation.

    Args:
        size: rows of a block; D must be divisible by it, or smaller, which makes one block of D rows.
        prior: $p_0$, the variance of every direction before anything is written.

    Step parameters: `process_noise` $\ell_t^2$ ≥ 0, [B,T,H].
    State: G·D·size elements, [B,H,G,D/size,size,size].
    """

    size: int = 16
    prior: float = 1.0
    exactness = "block-diagonal truncation"
    belief = BlockBelief

    def __post_init__(self) -> None:
        check_whole_number("Block", "size", self.size)
        check_prior("Block", self.prior)

    @property
    def parameter_sources(self) -> Mapping[str, Source]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Stationary noise returns memory to where it starts: σ² = p₀."""
        return {"stationary_variance": float(self.prior)}

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄ = A P Aᵀ + ℓ²N, P = blocks(P̄ − βuuᵀ)."""
        return (
            PREDICTED,
            Equation(
                f"P_t = the {self.size}×{self.size} blocks on the diagonal of P̄_t − β_t u_t u_tᵀ",
                rf"\mathbf{{P}}_t = \mathrm{{blocks}}_{{{self.size}}}("
                r"\bar{\mathbf{P}}_t - \beta_t \mathbf{u}_t \mathbf{u}_t^\top)",
            ),
        )

    def refuse_key_size(self, D: int) -> str | None:
        """Blocks must cover all rows."""
        return f"D divisible by the block size {self.size}" if D % self._rows(D) else None

    def _rows(self, D: int) -> int:
        """Rows of a block for keys of size D."""
        return min(self.size, D)

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
        """p₀ I for every block and group."""
        rows = self._rows(sizes.D)
        shape = (sizes.batch, sizes.heads, groups, sizes.D // rows, rows, rows)
        return (self.prior * torch.eye(rows, dtype=dtype, device=device)).expand(shape).clone()

    def predict(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """A P Aᵀ + Q as a whole matrix, since a drift may connect blocks."""
        del step
        return drifted(from_blocks(kept))

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        """P̄ k."""
        return product(predicted, k[:, :, None, :, None])[..., 0]

    def condition(self, predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
        """The blocks of P̄ − βuuᵀ."""
        return to_blocks(updated(predicted, event, k), self._rows(k.shape[-1]))

    def variance(self, kept: Tensor, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """The sum of qᵀ P q over blocks, or zero where rounding makes it negative."""
        del noise, step
        return read_variance(kept, q)

    def gains(self, kept: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        """Token by token, each in O(D·size) unless the drift connects blocks."""
        pairs_are_cut = drift.rows.angle is not None and kept.shape[-1] % 2
        if drift.noise is None or drift.rows.removal is not None or pairs_are_cut:
            return self.gains_by_token(kept, k, drift, q)
        return block_gains(kept, k, drift, q)

    def flaws(self, kept: Tensor, *, thorough: bool) -> list[Flaw]:
        """Asymmetric or indefinite blocks, beyond what rounding explains."""
        flaws = matrix_flaws(kept, thorough=thorough)
        return [flaw._replace(where=flaw.where.any(-1)) if flaw.where.ndim else flaw for flaw in flaws]

    def with_prior(self, prior: float) -> Block:
        """The same blocks with another prior."""
        return Block(self.size, prior)

    def elements(self, D: int, groups: int) -> int:
        """G·D·size."""
        return groups * D * self._rows(D)

    def formula(self, groups: int) -> str:
        """D·size for each group."""
        return times_groups(groups, f"{self.size}·D")

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """The same as for a matrix, for each block."""
        return f"{self.size}·G·D", groups * D * self._rows(D) * (2 * drift + 2)


def to_blocks(matrices: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal, [...,D/size,size,size], of matrices [...,D,D]."""
    blocks = matrices.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [...,D/size,size,D/size,size]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def read_variance(blocks: Tensor, q: Tensor) -> Tensor:
    """Σ over blocks of qᵀ P q, at least 0, [...,G]: blocks [...,G,n,size,size], q [...,D]."""
    q = q.unflatten(-1, blocks.shape[-3:-1])[..., None, :, None, :]  # [...,1,n,1,size]
    return (product(q, blocks) * q).sum((-3, -2, -1)).clamp_min(0)


def block_gains(start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
    """The gains of all tokens, from the blocks before the first; the specification of `block.c`."""
    assert drift.noise is not None
    sizes = start.shape[-3:-1]

    def cut(x: Tensor) -> Tensor:
        """[B,T,H,D] → [B,T,H,1,D/size,size]."""
        return x.expand(k.shape).unflatten(-1, sizes)[:, :, :, None]

    # one unbind for all tokens: the gradient of each x[:, t] would be as large as x
    decay, keys = cut(drift.rows.of_rows().exp()).unbind(1), cut(k).unbind(1)
    noise = torch.diag_embed(cut(drift.noise.entering(drift.rows))).unbind(1)
    write_noise, queries = drift.write_noise.unbind(1), () if q is None else q.unbind(1)
    angle = drift.rows.angle
    if angle is not None:
        angle = angle.unflatten(-1, (sizes[0], -1))[:, :, :, None].unbind(1)
    P, every = start, []
    for t in range(len(keys)):
        P = decay[t][..., :, None] * decay[t][..., None, :] * P
        if angle is not None:
            P = turned(turned(P, angle[t]).mT, angle[t])
            P = (P + P.mT) / 2
        P = P + noise[t]
        u = product(P, keys[t][..., None])[..., 0]
        precision = 1 / (write_noise[t] + (keys[t] * u).sum((-2, -1)))
        P = P - precision[..., None, None, None] * (u[..., :, None] * u[..., None, :])
        variance = () if q is None else (read_variance(P, queries[t]),)
        every.append((u.flatten(-2), precision, *variance))
    warped_key, precision, *variance = (torch.stack(parts, 1) for parts in zip(*every, strict=True))
    return Gains(warped_key, precision, precision, P, *variance)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs of columns of x, [...,n,size,size], turned by angles [...,n,size/2]: x Rᵀ."""
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    real, imaginary = x[..., 0::2], x[..., 1::2]
    return torch.stack((cos * real - sin * imaginary, sin * real + cos * imaginary), -1).flatten(-2)
