r"""A sequence cut into chunks, and seen from the frame that drifts with memory since the chunk's start.

Inside a chunk let f_τ be the accumulated decay from the chunk's start to τ (a scalar or one for each row), Θ_τ the
accumulated angle, and φ_τσ = f_τ/f_σ. In the frame that turns by Θ_τ with the memory, drift is decay alone. Decays are
kept as logarithms, and every exponent that is taken is at most 0: k/f is never formed, so a decay of 1e-4 at every step
is as exact as one of 0.99.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.products import product

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import RowDrift

SUB_BLOCK = 16
"""Rows of a decayed product whose factors are taken from differences of logarithms, entry by entry."""


def cut(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[B,T,H,...] → [B,H,K,C,...]: chunks of `size` tokens, the last one filled up."""
    x = x.transpose(1, 2)
    missing = -x.shape[2] % size
    if missing:
        x = torch.cat([x, x.new_full((*x.shape[:2], missing, *x.shape[3:]), fill)], 2)
    return x.unflatten(2, (-1, size))


def joined(x: Tensor, length: int) -> Tensor:
    """[B,H,K,C,...] → [B,T,H,...], without what was filled up."""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


class Frame(NamedTuple):
    """The drift inside every chunk.

    Attributes:
        log_decay: log f_τ, accumulated from the chunk's start to τ inclusive, at most 0, [B,H,K,C,R]; R is 1 for a
            decay that all rows share, D for one of each row.
        cos: cos Θ_τ of every pair of rows, [B,H,K,C,D/2], or None without rotation.
        sin: sin Θ_τ, likewise.
    """

    log_decay: Tensor
    cos: Tensor | None
    sin: Tensor | None

    @staticmethod
    def of(drift: RowDrift, size: int) -> Frame:
        """The frame of a drift, in chunks of `size` tokens."""
        accumulated = cut(drift.of_rows(), size).cumsum(3)
        if drift.angle is None:
            return Frame(accumulated, None, None)
        total = cut(drift.angle, size).cumsum(3)
        return Frame(accumulated, total.cos(), total.sin())

    def enter(self, x: Tensor) -> Tensor:
        """Turn x [..., K,C,D] by −Θ_τ, into the frame."""
        return x if self.cos is None or self.sin is None else turn_rows(x, self.cos, -self.sin)

    def leave(self, x: Tensor, chunk: int) -> Tensor:
        """Turn the rows of a memory x [..., D, n] by Θ_C of one chunk, back from the frame at the chunk's end."""
        if self.cos is None or self.sin is None:
            return x
        return turn_rows(x.mT, self.cos[..., chunk, -1:, :], self.sin[..., chunk, -1:, :]).mT

    def leave_each(self, x: Tensor) -> Tensor:
        """Turn x [..., K,C,D] by Θ_τ, out of the frame: the inverse of `enter`."""
        return x if self.cos is None or self.sin is None else turn_rows(x, self.cos, self.sin)

    def for_groups(self) -> Frame:
        """The same frame with an axis for noise groups, [B,H,1,K,C,·]."""
        return Frame._make(None if x is None else x.unsqueeze(2) for x in self)

    def from_start(self, x: Tensor) -> Tensor:
        """f_τ ⊙ x_τ: how x, [..., C, D], meets the belief at the chunk's start."""
        return self.log_decay.exp() * x

    def to_end(self, x: Tensor) -> Tensor:
        """φ_{Cτ} ⊙ x_τ: what is left of x, [..., C, D], at the chunk's end."""
        return (self.log_decay[..., -1:, :] - self.log_decay).exp() * x

    def over_chunk(self) -> Tensor:
        """f_C, [B,H,K,R]."""
        return self.log_decay[..., -1, :].exp()

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        r"""$\sum_i x_{\tau i}\,\varphi_{\tau\sigma,i}\,y_{\sigma i}$ for σ ≤ τ, and 0 above the diagonal.

        Args:
            x: [..., K,C,D].
            y: [..., K,C,D].

        Returns:
            [..., K,C,C].
        """
        if self.log_decay.shape[-1] == 1:
            g = self.log_decay[..., 0]
            return product(x, y.mT).tril() * (g[..., :, None] - g[..., None, :]).clamp_max(0).exp()
        return _row_decayed_product(x, y, self.log_decay)

    def weighted(self, weights: Tensor, y: Tensor) -> Tensor:
        r"""$\sum_{\sigma\le\tau} w_{\tau\sigma}\,\varphi_{\tau\sigma} \odot y_\sigma$: what every token has of y.

        Args:
            weights: w, [..., K,C,C], lower triangular.
            y: [..., K,C,D].

        Returns:
            [..., K,C,D].
        """
        if self.log_decay.shape[-1] == 1:
            g = self.log_decay[..., 0]
            return product(weights.tril() * (g[..., :, None] - g[..., None, :]).clamp_max(0).exp(), y)
        return _row_decayed_sum(weights, y, self.log_decay)


def _row_decayed_sum(weights: Tensor, y: Tensor, log_decay: Tensor) -> Tensor:
    """`Frame.weighted` for a decay of each row, in the same sub-blocks."""
    C = y.shape[-2]
    rows = []
    for start in range(0, C, SUB_BLOCK):
        here = slice(start, min(start + SUB_BLOCK, C))
        g = log_decay[..., here, :]
        between = (g[..., :, None, :] - g[..., None, :, :]).clamp_max(0).exp()
        total = (weights[..., here, here].tril()[..., None] * between * y[..., None, here, :]).sum(-2)
        if start:
            boundary = log_decay[..., start - 1 : start, :]
            earlier = y[..., :start, :] * (boundary - log_decay[..., :start, :]).exp()
            total = total + (g - boundary).exp() * product(weights[..., here, :start], earlier)
        rows.append(total)
    return torch.cat(rows, -2)


def _row_decayed_product(x: Tensor, y: Tensor, log_decay: Tensor) -> Tensor:
    """`Frame.product` for a decay of each row, in sub-blocks: off-diagonal ones refer to the boundary between them."""
    C = x.shape[-2]
    rows = []
    for start in range(0, C, SUB_BLOCK):
        here = slice(start, min(start + SUB_BLOCK, C))
        g = log_decay[..., here, :]
        parts = []
        if start:
            boundary = log_decay[..., start - 1 : start, :]
            earlier = y[..., :start, :] * (boundary - log_decay[..., :start, :]).exp()
            parts.append(product(x[..., here, :] * (g - boundary).exp(), earlier.mT))
        between = (g[..., :, None, :] - g[..., None, :, :]).clamp_max(0).exp()
        faded = x[..., here, None, :] * between
        inside = product(faded.transpose(-3, -2), y[..., here, :, None])[..., 0].mT
        parts.append(inside.tril())
        width = C - here.stop
        if width:
            parts.append(inside.new_zeros(*inside.shape[:-1], width))
        rows.append(torch.cat(parts, -1))
    return torch.cat(rows, -2)


def turn_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn interleaved pairs along the last axis of x, [..., D], by an angle with cos and sin [..., D/2]."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    return torch.stack((cos * real - sin * imaginary, sin * real + cos * imaginary), dim=-1).flatten(-2)


def accumulate(entering: Tensor, log_decay: Tensor) -> Tensor:
    r"""$n_\tau = \sum_{\sigma\le\tau} \varphi_{\tau\sigma}^2\, x_\sigma$, by doubling: what noise has built up by τ.

    Args:
        entering: $x_\sigma$, [..., C, R].
        log_decay: log f, [..., C, R].
    """
    total, shift = entering, 1
    C = entering.shape[-2]
    while shift < C:
        factor = (2 * (log_decay[..., shift:, :] - log_decay[..., :-shift, :])).exp()
        total = torch.cat([total[..., :shift, :], total[..., shift:, :] + factor * total[..., :-shift, :]], -2)
        shift *= 2
    return total
