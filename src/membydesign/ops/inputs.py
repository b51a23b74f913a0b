"""The arguments of a filter after they were checked: one type, one shape each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Inputs(NamedTuple):
    """Checked arguments in the state's type. A single step has the same fields without the axis T.

    Attributes:
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        process_noise: ℓ², [B,T,H], or None.
        write_noise: r², [B,T,H,G].
        prior_variance: λ, [B,T,H,1], or [B,T,H,M] for `PerColumnReset`, or None.
        log_decay: in the transition's own shape, or None.
        angle: in the transition's own shape, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    process_noise: Tensor | None
    write_noise: Tensor
    prior_variance: Tensor | None
    log_decay: Tensor | None
    angle: Tensor | None

    def at(self, t: int) -> Inputs:
        """The step at position t, without the axis T."""
        return self.map(lambda x: x[:, t])

    def between(self, start: int, end: int) -> Inputs:
        """Positions start to end − 1."""
        return self.map(lambda x: x[:, start:end])

    def padded(self, length: int) -> Inputs:
        """The same with tokens added at the end that neither drift nor write: k = 0, no decay, turn or noise."""
        missing = length - self.q.shape[1]
        if not missing:
            return self
        positive = {"write_noise", "prior_variance"}

        def longer(name: str, x: Tensor) -> Tensor:
            return torch.cat([x, x.new_full((len(x), missing, *x.shape[2:]), float(name in positive))], 1)

        return Inputs._make(None if x is None else longer(name, x) for name, x in self._asdict().items())

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """The same inputs with f applied to each that is present."""
        return Inputs._make(None if x is None else f(x) for x in self)

    @staticmethod
    def stacked(rows: Sequence[Inputs]) -> Inputs:
        """Several inputs of one length as a batch."""
        return Inputs._make(None if parts[0] is None else torch.cat(parts) for parts in zip(*rows, strict=True))
