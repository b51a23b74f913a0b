r"""A drift and its noise, row by row: what a `Transition` tells the chunked kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


class Removal(NamedTuple):
    r"""What a drift takes out of memory besides its decay: $A_t = \mathrm{diag}(w_t) - b_t \kappa_t^\top$.

    Attributes:
        key: κ, what is read from memory to be removed, [B,T,H,D].
        direction: b, where it is removed, [B,T,H,D].
    """

    key: Tensor
    direction: Tensor


class RowDrift(NamedTuple):
    r"""A drift that is a decay of each row or a damped turn of each interleaved pair of rows, for the chunked kernels.

    Attributes:
        log_decay: logarithms of the decays, at most 0: [B,T,H,1] shared by all rows, or [B,T,H,D]; or, with an angle,
            [B,T,H,D/2] for pairs of rows.
        angle: turn of each pair in radians, [B,T,H,D/2], or None.
        removal: what is taken out of memory besides, or None.
    """

    log_decay: Tensor
    angle: Tensor | None = None
    removal: Removal | None = None

    def of_rows(self) -> Tensor:
        """The decays of rows, [B,T,H,1] or [B,T,H,D]."""
        pairs = self.angle is not None and 1 < self.log_decay.shape[-1] == self.angle.shape[-1]
        return self.log_decay.repeat_interleave(2, -1) if pairs else self.log_decay

    def of_pairs(self) -> Tensor:
        """The decays of the pairs of rows that turn, [B,T,H,D/2]."""
        assert self.angle is not None
        each_row = self.log_decay.shape[-1] == 2 * self.angle.shape[-1]
        return self.log_decay[..., 0::2] if each_row else self.log_decay.expand_as(self.angle)


class RowNoise(NamedTuple):
    """Process noise without correlations between rows, for the chunked kernels: ℓ² N, or σ² (I − A Aᵀ).

    Attributes:
        variance: ℓ², or σ² of stationary noise, [B,T,H].
        rows: the diagonal of N: ones, and zeros for rows that receive no noise, [D]; [1] if all rows are alike.
        stationary: whether the noise is σ² (I − A Aᵀ), which replaces what the decay takes; rows are then alike.
    """

    variance: Tensor
    rows: Tensor
    stationary: bool = False

    def entering(self, drift: RowDrift) -> Tensor:
        """The variance that enters each row, [B,T,H,D], or [B,T,H,1] if it is the same for all rows."""
        variance = self.variance[..., None]
        return -torch.expm1(2 * drift.of_rows()) * variance if self.stationary else variance * self.rows

    def map(self, f: Callable[[Tensor], Tensor]) -> RowNoise:
        """The same noise with f applied to both tensors."""
        return self._replace(variance=f(self.variance), rows=f(self.rows))
