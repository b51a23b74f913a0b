"""A drift of one token or of a whole sequence, and the gains of its writes: what passes between parts and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from membydesign.design.row_drift import RowDrift, RowNoise


class Gains(NamedTuple):
    r"""Where and how strongly every token of a sequence writes: all that the mean needs to know of the covariance.

    Attributes:
        direction: d, [B,T,H,1,D] if all groups write in one direction, otherwise [B,T,H,G,D]; the gain is γ d.
        strength: γ, [B,T,H,G].
        precision: β, the innovation precision, [B,T,H,G].
        kept: what is kept of the covariance after the last token.
        variance: of the reads, [B,T,H,G]; None unless queries were given.
    """

    direction: Tensor
    strength: Tensor
    precision: Tensor
    kept: Any
    variance: Tensor | None = None


def squared_norm(k: Tensor) -> Tensor:
    """The squared norm of every key, [..., D] → [..., 1]."""
    return k.square().sum(-1, keepdim=True)


class Drift(NamedTuple):
    """How the drift of one token changes covariances: `drift(P)` maps matrices P, [B,H,G,D,D], to A P Aᵀ + Q.

    Attributes:
        apply: maps x, [B,H,G,D,n], to A x.
        noise: Q, [B,H,1,D,D]; None for a design without process noise.
    """

    apply: Callable[[Tensor], Tensor]
    noise: Tensor | None = None

    def __call__(self, P: Tensor) -> Tensor:
        """A P Aᵀ + Q, symmetric to the last bit."""
        P = self.apply(self.apply(P).mT)  # A (A P)ᵀ = A P Aᵀ
        P = (P + P.mT) / 2
        return P if self.noise is None else P + self.noise


class SequenceDrift(NamedTuple):
    """How memory drifts over a sequence, and the noise of its writes: what `Covariance.gains` starts from.

    Attributes:
        rows: the drift of rows.
        noise: process noise of rows; None for a design without process noise.
        write_noise: r², [B,T,H,G].
        parameters: all step parameters by name, [B,T,H,...].
        steps: the drift of one token: `steps(t)` maps P, [B,H,G,D,D], to A_t P A_tᵀ + Q_t.
        squared_norm: of all keys, [B,T,H,D] → [B,T,H,1]: in torch, or faster where a kernel can.
    """

    rows: RowDrift
    noise: RowNoise | None
    write_noise: Tensor
    parameters: Mapping[str, Tensor]
    steps: Callable[[int], Drift]
    squared_norm: Callable[[Tensor], Tensor] = squared_norm
