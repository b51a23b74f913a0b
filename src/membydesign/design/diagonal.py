r"""The diagonal covariance: correlations between key dimensions are discarded after each write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from membydesign.belief import DiagonalBelief
from membydesign.design.covariance import PREDICTED, Covariance, check_prior, times_groups, updated
from membydesign.design.protocol import Flaw, Step
from membydesign.design.schema import Equation
from membydesign.design.sequence_drift import Drift, Gains, SequenceDrift
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design.sources import Source
    from membydesign.design.write import WriteEvent
    from membydesign.state import Sizes


RESOLVED = 1 / 16
"""A row that keeps less than this part of its variance is computed by `resolved`, not as a difference."""


@final
@dataclass(frozen=True)
class Diagonal(Covariance):
    r"""Only the diagonal survives each update; correlations between key dimensions are discarded.

    $$\bar P_t = A_t P_{t-1} A_t^\top + \ell_t^2 N, \qquad
    P_t = \mathrm{diag}\bigl(\mathrm{diag}(\bar P_t - \beta_t u_t u_t^\top)\bigr), \qquad P_0 = p_0 I$$

    Args:
        prior: $p_0$, the variance of every direction before anything is written.

    Step parameters: `process_noise` $\ell_t^2$ ≥ 0, [B,T,H].
    State: G·D elements, [B,H,G,D].
    """

    prior: float = 1.0
    exactness = "diagonal truncation"
    belief = DiagonalBelief

    def __post_init__(self) -> None:
        check_prior("Diagonal", self.prior)

    @property
    def parameter_sources(self) -> Mapping[str, Source]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Stationary noise returns memory to where it starts: σ² = p₀."""
        return {"stationary_variance": float(self.prior)}

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄ = A P Aᵀ + ℓ²N, P = diag(P̄ − βuuᵀ)."""
        return (
            PREDICTED,
            Equation(
                "P_t = the diagonal of P̄_t − β_t u_t u_tᵀ",
                r"\mathbf{P}_t = \mathrm{diag}(\mathrm{diag}("
                r"\bar{\mathbf{P}}_t - \beta_t \mathbf{u}_t \mathbf{u}_t^\top))",
            ),
        )

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
        """p₀ for every row and group."""
        return torch.full((sizes.batch, sizes.heads, groups, sizes.D), self.prior, dtype=dtype, device=device)

    def predict(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """A diag(p) Aᵀ + Q, which a rotation makes more than diagonal."""
        del step
        return drifted(torch.diag_embed(kept))

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        """P̄ k."""
        return product(predicted, k[:, :, None, :, None])[..., 0]

    def condition(self, predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
        r"""The diagonal of P̄ − βuuᵀ, positive by construction.

        A row that a sure write resolves would be a difference of almost equal numbers. With
        $S_i \sim \mathcal N(0, z_i)$ the write reads $g_i S_i$, $g_i = u_i/z_i$, with noise
        $d_i = r^2 + k^\top\bar P k - u_i^2/z_i$, and both are computed from the other rows alone (`resolved`).
        """
        if event.noise is None:
            return updated(predicted, event, k).diagonal(dim1=-2, dim2=-1)
        u, k = event.warped_key, k[..., None, :]
        variances = predicted.diagonal(dim1=-2, dim2=-1)
        difference = variances - event.precision[..., None] * (u * u)
        sure = difference < RESOLVED * variances
        if _is_known(sure) and not bool(sure.any()):
            return difference
        across = product(predicted - torch.diag_embed(variances), k[..., None])[..., 0]
        key = k + across / torch.where(sure, variances, 1.0)
        apart = 1 - torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        others = product((k * u)[..., None, :], apart)[..., 0, :] - key * across
        noise = event.noise[..., None] + others.clamp_min(0)
        return resolved(difference, sure, variances, key, noise)

    def variance(self, kept: Tensor, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """Σ p q²."""
        del noise, step
        return product(kept, (q * q)[..., None])[..., 0]

    def gains(self, kept: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains | None:
        """Token by token, each in O(D): without a rotation P̄ is diagonal, with one it has 2×2 blocks."""
        if drift.noise is None:
            return None
        return diagonal_gains(kept, k, drift).with_reads(q)

    def flaws(self, kept: Tensor, *, thorough: bool) -> list[Flaw]:
        """Negative variances."""
        del thorough
        return [
            Flaw(
                "covariance",
                "variances of at least 0",
                kept < 0,
                lambda _: f"{kept.min().item():.3g}",
                NotPositiveDefiniteError,
            )
        ]

    def with_prior(self, prior: float) -> Diagonal:
        """Diagonal(prior)."""
        return Diagonal(prior)

    def elements(self, D: int, groups: int) -> int:
        """G·D."""
        return groups * D

    def formula(self, groups: int) -> str:
        """D for each group."""
        return times_groups(groups, "D")

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """The same as for matrices, entry by entry."""
        return "G·D", groups * D * (2 * drift + 2)


def resolved(difference: Tensor, sure: Tensor, variances: Tensor, key: Tensor, noise: Tensor) -> Tensor:
    """The variances after a write, taken from `difference` except for the rows that are `sure`: d / (d/z + g²).

    That is 1/(1/z + g²/d), the variance z given one observation with key g and noise d > 0: it is positive, and neither
    it nor its gradient has a difference of almost equal numbers.

    Args:
        difference: z − βu².
        sure: which rows keep less than `RESOLVED` of their variance.
        variances: z, before the write.
        key: g.
        noise: d.
    """
    variances, noise = torch.where(sure, variances, 1.0), torch.where(sure, noise, 1.0)
    return torch.where(sure, noise / (noise / variances + key * key), difference)


def _is_known(x: Tensor) -> bool:
    """Whether reading the values of x is possible, and costs nothing."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(x) is torch.Tensor and x.device.type == "cpu" and not torch._C._len_torch_dispatch_stack()


class DiagonalGains(NamedTuple):
    """The gains of all tokens under a diagonal covariance, and the variances that they leave.

    Attributes:
        warped_key: u, [B,T,H,G,D].
        precision: β, [B,T,H,G].
        variances: p, [B,T,H,G,D].
    """

    warped_key: Tensor
    precision: Tensor
    variances: Tensor

    def with_reads(self, q: Tensor | None) -> Gains:
        """The same as `Gains`, with the variances of reads at q, [B,T,H,D], unless it is None."""
        variance = None if q is None else product(self.variances, q.square()[..., None])[..., 0]
        # not a view of the variances, which would keep those of all tokens alive
        return Gains(self.warped_key, self.precision, self.precision, self.variances[:, -1].clone(), variance)


def diagonal_gains(start: Tensor, k: Tensor, drift: SequenceDrift) -> DiagonalGains:
    """The gains of all tokens, from the variances before the first, [B,H,G,D]; the specification of `diagonal.c`."""
    gains = _diagonal_gains(start, k, drift, careful=False)
    lowered = gains.precision[..., None] * gains.warped_key * k[:, :, :, None]  # the part that a write takes from z
    if drift.rows.angle is not None:
        lowered = lowered.unflatten(-1, (-1, 2)).sum(-1)
    if _is_known(lowered) and bool((lowered <= 1 - RESOLVED).all()):
        return gains
    return _diagonal_gains(start, k, drift, careful=True)


def _diagonal_gains(start: Tensor, k: Tensor, drift: SequenceDrift, *, careful: bool) -> DiagonalGains:
    """The same; only if `careful` are rows that a sure write resolves positive by construction."""
    assert drift.noise is not None
    rows = drift.rows
    # one unbind for all tokens: the gradient of each x[:, t] would be as large as x
    squared_decay = (2 * rows.of_rows()).exp()[:, :, :, None].unbind(1)
    noise = drift.noise.entering(rows)[:, :, :, None].unbind(1)
    keys, write_noise = k[:, :, :, None].unbind(1), drift.write_noise.unbind(1)
    angle = None if rows.angle is None else rows.angle[:, :, :, None].unbind(1)
    p, every = start, []
    for t in range(len(keys)):
        turn = None if angle is None else angle[t]
        every.append(_diagonal_gain(p, squared_decay[t], noise[t], keys[t], write_noise[t], turn, careful=careful))
        p = every[-1].variances
    return DiagonalGains(*(torch.stack(parts, 1) for parts in zip(*every, strict=True)))


def _diagonal_gain(
    p: Tensor,
    squared_decay: Tensor,
    noise: Tensor,
    k: Tensor,
    write_noise: Tensor,
    angle: Tensor | None,
    *,
    careful: bool,
) -> DiagonalGains:
    """One token: the same without the axis T; p [B,H,G,D], squared_decay, noise, k and angle [B,H,1,·]."""
    faded, swapped = squared_decay * p, None
    if angle is None:
        turned, predicted = faded, faded + noise
        u = predicted * k
    else:
        cos, sin = angle.cos(), angle.sin()
        real, imaginary = faded[..., 0::2], faded[..., 1::2]
        diagonal = (cos**2 * real + sin**2 * imaginary, sin**2 * real + cos**2 * imaginary)
        turned = torch.stack(diagonal, -1).flatten(-2)
        predicted = turned + noise
        across = cos * sin * (real - imaginary)
        swapped = torch.stack((across * k[..., 1::2], across * k[..., 0::2]), -1).flatten(-2)
        u = predicted * k + swapped
    precision = 1 / (write_noise + (k * u).sum(-1))
    difference = predicted - precision[..., None] * u.square()
    if not careful:
        return DiagonalGains(u, precision, difference)
    sure = difference < RESOLVED * predicted
    each = k * u
    if swapped is None:  # all but one row keep half of their variance or more
        others = torch.where(sure, 0.0, each).sum(-1, keepdim=True)
        return DiagonalGains(u, precision, resolved(difference, sure, predicted, k, write_noise[..., None] + others))
    pairs = sure.unflatten(-1, (-1, 2)).any(-1)  # one at most
    others = torch.where(pairs, 0.0, each.unflatten(-1, (-1, 2)).sum(-1).clamp_min(0)).sum(-1, keepdim=True)
    # what the other row of the pair has beyond its correlation with this one: (z₁z₂ − w²)/z₁, without the difference
    noise = noise.expand_as(turned)
    determinant = _other(faded) * faded + noise * _other(turned) + _other(noise) * turned + noise * _other(noise)
    safe = torch.where(sure, predicted, 1.0)
    rest = write_noise[..., None] + others + _other(k).square() * determinant / safe
    return DiagonalGains(u, precision, resolved(difference, sure, predicted, k + swapped / safe, rest))


def _other(x: Tensor) -> Tensor:
    """The other row of each pair."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
