r"""The state of a Gaussian memory, and what can be read from it.

$S \sim \mathcal N(M, I_M \otimes P)$: value columns are independent given their group's covariance over key directions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.products import product
from membydesign.state import Sizes, destination, map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from typing_extensions import Self


class Belief(NamedTuple):
    r"""What a memory holds and how sure it is, $S \sim \mathcal N(M, P)$ for every batch entry and head.

    Beliefs are passed in and returned, never hidden in a module; they are float32 at least.

    Attributes:
        mean: M, [B,H,D,M]; [N,H,D,M] after N packed sequences.
        covariance: P, [B,H,G,D,D]; None for a design that keeps no covariance. Other structures have a class of their
            own: `DiagonalBelief` keeps the diagonal, [B,H,G,D].
    """

    mean: Tensor
    covariance: Any = None

    def read(self, q: Tensor) -> Tensor:
        r"""The mean read-out $M^\top q$.

        Args:
            q: [B,H,D].

        Returns:
            [B,H,M].
        """
        self._check("q", q, self.mean.shape[:3])
        return product(q[..., None, :], self.mean)[..., 0, :]

    def variance(self, q: Tensor) -> Tensor:
        r"""The variance $q^\top P q$ of each coordinate of the read-out $S^\top q$.

        Where rounding makes it negative it is reported as zero.

        Args:
            q: [B,H,D].

        Returns:
            [B,H,G], one for each noise group.
        """
        if self.covariance is None:
            raise ValueError("belief: expected one with a covariance to read a variance from, got covariance=None")
        self._check("q", q, self.mean.shape[:3])
        q = q[:, :, None, None]  # [B,H,1,1,D]
        return (product(q, self.covariance) * q).sum((-2, -1)).clamp_min(0)

    def log_evidence(self, k: Tensor, v: Tensor, write_noise: Tensor | float) -> Tensor:
        r"""How expected it is to observe v at key k: $\log \mathcal N(v \mid M^\top k,\ (r^2 + k^\top P k) I)$.

        Args:
            k: [B,H,D].
            v: [B,H,M].
            write_noise: r² > 0, [B,H,G] or a number.

        Returns:
            [B,H].
        """
        B, H, _, M = self.mean.shape
        variance = self.variance(k)
        self._check("v", v, (B, H, M))
        if isinstance(write_noise, torch.Tensor) and write_noise.ndim:
            self._check("write_noise", write_noise, variance.shape)
        return gaussian_log_density(v - self.read(k), 1 / (write_noise + variance))

    def _check(self, name: str, x: Tensor, shape: Sequence[int]) -> None:
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {list(shape)} to go with the belief, got {list(x.shape)}")

    def dense_covariance(self) -> Tensor:
        """P as matrices [B,H,G,D,D], whatever structure is kept."""
        if self.covariance is None:
            raise ValueError("belief: expected one with a covariance, got covariance=None")
        return self.covariance

    def detach(self) -> Self:
        """The same belief, cut off from the autograd graph."""
        return self.map(lambda x: x.detach())

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same belief on another device, or in another type: float32 or float64, and never below."""
        place, dtype = destination(device, dtype)
        return self.map(lambda x: x.to(place, dtype))

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The belief with f applied to mean and covariance, for example `belief.map(lambda x: x[:1])`."""
        return map_state(f, self)

    @staticmethod
    def prior(
        design: Any,
        batch: int,
        heads: int,
        D: int,
        M: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Any:
        r"""The belief before anything is written, for a Gaussian design $M_0 = 0$, $P_0 = p_0 I$.

        Args:
            design: whose `prior` it is.
            batch: B.
            heads: H.
            D: key size.
            M: value size.
            dtype: float32 or float64.
            device: where to put it.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype: expected float32 or float64 for a belief, got {dtype}")
        return design.prior(Sizes(batch, heads, D, M), dtype=dtype, device=device)


class DiagonalBelief(Belief):
    """A belief that keeps the diagonal of its covariance.

    Attributes:
        mean: M, [B,H,D,M].
        covariance: the diagonal of P, [B,H,G,D].
    """

    __slots__ = ()

    def variance(self, q: Tensor) -> Tensor:
        r"""The variance $\sum_i q_i^2 p_i$ of each coordinate of the read-out at q, [B,H,D]: [B,H,G]."""
        self._check("q", q, self.mean.shape[:3])
        return product(self.covariance, (q * q)[..., None])[..., 0]

    def dense_covariance(self) -> Tensor:
        """P as matrices [B,H,G,D,D]."""
        return torch.diag_embed(self.covariance)


torch.serialization.add_safe_globals([Belief, DiagonalBelief])  # torch.load reads saved beliefs without unpickling code


def gaussian_log_density(error: Tensor, precision: Tensor) -> Tensor:
    r"""$\log \mathcal N(e \mid 0, \beta^{-1} I)$, summed over columns, with one precision for each group of columns.

    Args:
        error: e, [..., M].
        precision: β, [..., G]; column j belongs to group ⌊j·G/M⌋.

    Returns:
        [...].
    """
    columns = error.shape[-1] // precision.shape[-1]
    squares = error.unflatten(-1, (precision.shape[-1], columns)).square().sum(-1)
    return 0.5 * (columns * (precision / (2 * math.pi)).log() - precision * squares).sum(-1)
