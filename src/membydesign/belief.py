r"""The state of a memory: a Gaussian belief, and what can be read from it.

$S \sim \mathcal N(M, I_M \otimes P)$: value columns are independent given their group's covariance over key directions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.design import Dense, Diagonal
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from membydesign.design import DesignModel


class Belief(NamedTuple):
    r"""What a memory holds and how sure it is, $S \sim \mathcal N(M, P)$ for every batch entry and head.

    Beliefs are passed in and returned, never hidden in a module; they are float32 at least.

    Attributes:
        mean: M, [B,H,D,M]; [N,H,D,M] after N packed sequences.
        covariance: P, [B,H,G,D,D] for a `Dense` design; its diagonal, [B,H,G,D], for a `Diagonal` one; None for a
            design that keeps no covariance.
    """

    mean: Tensor
    covariance: Tensor | None = None

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
        if self.covariance.ndim == self.mean.ndim:
            return product(self.covariance, (q * q)[..., None])[..., 0]
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
        """P as matrices [B,H,G,D,D], also where only the diagonal is kept."""
        if self.covariance is None:
            raise ValueError("belief: expected one with a covariance, got covariance=None")
        return torch.diag_embed(self.covariance) if self.covariance.ndim == self.mean.ndim else self.covariance

    def detach(self) -> Belief:
        """The same belief, cut off from the autograd graph."""
        return self.map(lambda x: x.detach())

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Belief:
        """The same belief on another device, or in another type: float32 or float64, and never below."""
        place, dtype = destination(device, dtype)
        return self.map(lambda x: x.to(place, dtype))

    def map(self, f: Callable[[Tensor], Tensor]) -> Belief:
        """The belief with f applied to mean and covariance, for example `belief.map(lambda x: x[:1])`."""
        return Belief._make(None if x is None else f(x) for x in self)

    @staticmethod
    def prior(
        design: DesignModel,
        batch: int,
        heads: int,
        D: int,
        M: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Belief:
        r"""The belief before anything is written: $M_0 = 0$, $P_0 = p_0 I$.

        Args:
            design: whose `covariance.prior` is $p_0$.
            batch: B.
            heads: H.
            D: key size.
            M: value size.
            dtype: float32 or float64.
            device: where to put it.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype: expected float32 or float64 for a belief, got {dtype}")
        mean_shape, covariance_shape = Belief.shapes(design, batch, heads, D, M)
        mean = torch.zeros(mean_shape, dtype=dtype, device=device)
        match design.covariance:
            case Dense(prior=prior):
                identity = torch.eye(D, dtype=dtype, device=device)
                return Belief(mean, (prior * identity).expand(covariance_shape).clone())
            case Diagonal(prior=prior):
                return Belief(mean, torch.full(covariance_shape, prior, dtype=dtype, device=device))
            case _:
                return Belief(mean)

    @staticmethod
    def shapes(design: DesignModel, batch: int, heads: int, D: int, M: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of mean and covariance; the latter is empty for a design that keeps none."""
        groups = (batch, heads, design.write.groups, D)
        match design.covariance:
            case Dense():
                return (batch, heads, D, M), (*groups, D)
            case Diagonal():
                return (batch, heads, D, M), groups
            case _:
                return (batch, heads, D, M), ()


torch.serialization.add_safe_globals([Belief])  # torch.load reads saved beliefs without unpickling code


def destination(
    device: torch.device | str | torch.dtype | None, dtype: torch.dtype | None
) -> tuple[torch.device | None, torch.dtype | None]:
    """Where `to` brings a belief; refuses types in which a covariance would not stay positive definite for long."""
    if isinstance(device, torch.dtype) and dtype is None:  # belief.to(torch.float64), as tensors have it
        device, dtype = None, device
    if device is not None and not isinstance(device, (str, torch.device)):
        raise ValueError(f'device: expected a device such as "cuda", got {device!r}')
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype: expected float32 or float64 for a belief, got {dtype!r}")
    return None if device is None else torch.device(device), dtype


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
