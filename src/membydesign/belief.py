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


class BlockBelief(Belief):
    """A belief that keeps blocks on the diagonal of its covariance.

    Attributes:
        mean: M, [B,H,D,M].
        covariance: the blocks of P, [B,H,G,D/size,size,size].
    """

    __slots__ = ()

    def variance(self, q: Tensor) -> Tensor:
        r"""The variance $q^\top P q$ of each coordinate of the read-out at q, [B,H,D]: [B,H,G]."""
        self._check("q", q, self.mean.shape[:3])
        q = q.unflatten(-1, self.covariance.shape[-3:-1])[:, :, None, :, None]  # [B,H,1,D/size,1,size]
        return (product(q, self.covariance) * q).sum((-3, -2, -1)).clamp_min(0)

    def dense_covariance(self) -> Tensor:
        """P as matrices [B,H,G,D,D]."""
        return from_blocks(self.covariance)


def from_blocks(blocks: Tensor) -> Tensor:
    """Matrices [...,n·size,n·size] with these blocks on the diagonal, [...,n,size,size], and zeros elsewhere."""
    matrices = torch.diag_embed(blocks.movedim(-3, -1))  # [...,size,size,n,n]
    return matrices.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).flatten(-4, -3).flatten(-2, -1)


class Resolved(NamedTuple):
    r"""A covariance that is the prior's except in a few directions, $P = \sigma^2 (I - W^\top W)$.

    Attributes:
        rows: W, [B,H,G,R,D]: what writes have resolved. Rows turned among each other are the same covariance.
        prior: σ², [B,H,G].
    """

    rows: Tensor
    prior: Tensor

    def quadratic(self, q: Tensor) -> Tensor:
        r"""$q^\top P q = \sigma^2(\lVert q \rVert^2 - \lVert W q \rVert^2)$, at least 0: [B,H,G] for q [B,H,D]."""
        resolved = product(self.rows, q[:, :, None, :, None])[..., 0].square().sum(-1)
        return self.prior * (q.square().sum(-1, keepdim=True) - resolved).clamp_min(0)

    def dense(self) -> Tensor:
        """P as matrices [B,H,G,D,D], symmetric to the last bit."""
        resolved = product(self.rows.mT, self.rows)
        identity = torch.eye(self.rows.shape[-1], dtype=resolved.dtype, device=resolved.device)
        return self.prior[..., None, None] * (identity - (resolved + resolved.mT) / 2)


class LowRankBelief(Belief):
    """A belief whose covariance is the prior's except in a few directions.

    Attributes:
        mean: M, [B,H,D,M].
        covariance: W and σ², a `Resolved`.
    """

    __slots__ = ()

    def variance(self, q: Tensor) -> Tensor:
        r"""The variance $q^\top P q$ of each coordinate of the read-out at q, [B,H,D]: [B,H,G]."""
        self._check("q", q, self.mean.shape[:3])
        return self.covariance.quadratic(q)

    def dense_covariance(self) -> Tensor:
        """P as matrices [B,H,G,D,D]."""
        return self.covariance.dense()


class ScaledBelief(NamedTuple):
    r"""A Gaussian belief whose variances are known up to one factor: the state of `UnknownScale`.

    $$S \mid \tau \sim \mathcal N(M, \tau^{-1} P), \qquad \tau \sim \mathrm{Gamma}(a, b)$$

    Attributes:
        base: M and P, the belief of the wrapped design.
        shape: a > 1, [B,H,G]: half as many values as have been observed, and the prior's.
        rate: b > 0, [B,H,G]: half the sum of their squared errors, each in units of its expected variance.
    """

    base: Any
    shape: Tensor
    rate: Tensor

    @property
    def mean(self) -> Tensor:
        """M, [B,H,D,M]."""
        return self.base.mean

    @property
    def scale(self) -> Tensor:
        r"""$\mathrm E[\tau^{-1}] = b/(a-1)$, the factor of all variances, [B,H,G]."""
        return self.rate / (self.shape - 1)

    def read(self, q: Tensor) -> Tensor:
        r"""The mean read-out $M^\top q$ at q, [B,H,D]: [B,H,M]."""
        return self.base.read(q)

    def variance(self, q: Tensor) -> Tensor:
        r"""The variance $\frac{b}{a-1} q^\top P q$ of each coordinate of the read-out at q, [B,H,D]: [B,H,G]."""
        return self.scale * self.base.variance(q)

    def log_evidence(self, k: Tensor, v: Tensor, write_noise: Tensor | float) -> Tensor:
        r"""How expected it is to observe v, [B,H,M], at key k, [B,H,D]: the log density of a Student-t, [B,H].

        Args:
            k: [B,H,D].
            v: [B,H,M].
            write_noise: r² > 0 before scaling, [B,H,G] or a number.
        """
        precision = 1 / (write_noise + self.base.variance(k))
        squares = innovation_squares(v - self.read(k), precision)
        return student_t_log_density(squares, precision, self.shape, self.rate, v.shape[-1] // precision.shape[-1])

    def detach(self) -> Self:
        """The same belief, cut off from the autograd graph."""
        return self.map(lambda x: x.detach())

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same belief on another device, or in another type: float32 or float64, and never below."""
        place, dtype = destination(device, dtype)
        return self.map(lambda x: x.to(place, dtype))

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The belief with f applied to each of its tensors."""
        return map_state(f, self)


# torch.load reads saved beliefs without unpickling code
torch.serialization.add_safe_globals([Belief, DiagonalBelief, BlockBelief, LowRankBelief, Resolved, ScaledBelief])


def innovation_squares(error: Tensor, precision: Tensor) -> Tensor:
    r"""$\beta \lVert e \rVert^2$ for each group of columns: what squared errors are in units of their variance.

    Args:
        error: e, [..., M].
        precision: β, [..., G]; column j belongs to group ⌊j·G/M⌋.

    Returns:
        [..., G].
    """
    return precision * error.unflatten(-1, (precision.shape[-1], -1)).square().sum(-1)


def gaussian_log_density(error: Tensor, precision: Tensor) -> Tensor:
    r"""$\log \mathcal N(e \mid 0, \beta^{-1} I)$, summed over columns, with one precision for each group of columns.

    Args:
        error: e, [..., M].
        precision: β, [..., G]; column j belongs to group ⌊j·G/M⌋.

    Returns:
        [...].
    """
    return log_density_of_squares(innovation_squares(error, precision), precision, error.shape[-1])


def log_density_of_squares(squares: Tensor, precision: Tensor, M: int) -> Tensor:
    """`gaussian_log_density` of errors in M columns, from `innovation_squares` of them, [..., G]."""
    columns = M // precision.shape[-1]
    return 0.5 * (columns * (precision / (2 * math.pi)).log() - squares).sum(-1)


def student_t_log_density(squares: Tensor, precision: Tensor, shape: Tensor, rate: Tensor, columns: int) -> Tensor:
    r"""The log density of errors $e \mid \tau \sim \mathcal N(0, (\tau\beta)^{-1} I)$ under τ ~ Gamma(a, b).

    That is a multivariate Student-t with 2a degrees of freedom and scale $\frac{b}{a\beta} I$ in each group,

    $$\log\frac{\Gamma(a + m/2)}{\Gamma(a)} - \frac m2 \log\frac{2\pi b}{\beta}
    - \Bigl(a + \frac m2\Bigr) \log\Bigl(1 + \frac{\beta\lVert e\rVert^2}{2b}\Bigr).$$

    Args:
        squares: β‖e‖², [..., G].
        precision: β, [..., G].
        shape: a, [..., G].
        rate: b, [..., G].
        columns: m, how many columns a group has.

    Returns:
        The sum over groups, [...].
    """
    half = columns / 2
    tail = (shape + half) * (squares / (2 * rate)).log1p()
    return (log_gamma_ratio(shape, half) + half * (precision / (2 * math.pi * rate)).log() - tail).sum(-1)


_SHIFT = 8
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Coefficients of z⁻¹, z⁻³, … in log Γ(z); from z = 8 on they leave an error below 1e-15."""


def log_gamma_ratio(a: Tensor, h: float) -> Tensor:
    r"""$\log\Gamma(a + h) - \log\Gamma(a)$ for a > 0 and h ≥ 0, without the cancellation of two large logarithms.

    The difference of two `lgamma` has an error of 0.1 in float32 at a = 10⁵; this one keeps all digits.
    """
    z, w = a + _SHIFT, a + (_SHIFT + h)
    ratio = (z - 0.5) * (h / z).log1p() + h * (w.log() - 1)
    for n, coefficient in enumerate(_STIRLING):
        ratio = ratio + coefficient * (w ** -(2 * n + 1) - z ** -(2 * n + 1))
    for i in range(_SHIFT):  # Γ(z + 1) = z Γ(z)
        ratio = ratio - (h / (a + i)).log1p()
    return ratio
