r"""Designs whose evidence adds up: counts in D slots, each normalised by what the slot has seen.

    A_t = δ_t A_{t-1} + (1 − δ_t) A₀ + k_t v_tᵀ                 what slot i has seen of column j, D×M
    n_t = δ_t n_{t-1} + (1 − δ_t) n₀ + w(v_t) k_t               how much slot i has seen, D
    y_t = Σ_i q_i A_i / n_i                                     the read: each slot's ratio, weighted by the query

(A₀, n₀) is where forgetting leads, and w(v) what a value weighs. This is linear attention with a decay shared by all
rows, read at the query q/n, so every `AdditiveDesign` runs on the chunked mean pass (`filter/torch/additive.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from membydesign.design.passage import FadingSums
from membydesign.design.protocol import Design, Reading, Written
from membydesign.design.schema import StepParameter
from membydesign.design.sources import Spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design.passage import Passage
    from membydesign.design.protocol import State, Step
    from membydesign.design.sources import Source


class Sums(NamedTuple):
    """The sums that an `AdditiveDesign` keeps.

    Attributes:
        table: A, what each slot has seen of each column, [B,H,D,M].
        total: n, how much each slot has seen, [B,H,D].
    """

    table: Tensor
    total: Tensor


class AdditiveDesign(Design):
    r"""A design that adds $k_t v_t^\top$ to a table of D slots and reads $\sum_i q_i A_i / n_i$.

    Derive from it for a conjugate belief of that kind: say how the state holds the sums (`sums`, `state_of`), what a
    value weighs (`weight`), where forgetting leads (`resting`), the density of a write and the variance of a read.
    Transition, write, read and the chunked kernels follow. `variance_weights` is optional, for speed.

    Step parameters: `log_decay` log δ [B,T,H], at most 0.
    """

    exactness = "exact filter"
    step_parameters = (StepParameter("log_decay", "log δ_t", bound="<= 0"),)
    has_variance = True
    key_bound = value_bound = ">= 0"

    @abstractmethod
    def sums(self, state: State) -> Sums:
        """The sums that a state holds; axes before D may be any."""

    @abstractmethod
    def state_of(self, sums: Sums) -> State:
        """The state that holds these sums."""

    @abstractmethod
    def weight(self, v: Tensor) -> Tensor:
        """w(v), how much a unit of key adds to the total: [..., M] → [...]."""

    @abstractmethod
    def resting(self, M: int) -> tuple[float, float]:
        """A₀ and n₀, where forgetting leads, for M columns: the same numbers for every slot and column."""

    @abstractmethod
    def log_density(self, predicted: Sums, k: Tensor, v: Tensor) -> Tensor:
        """The log of the predictive density of a write, [B,H], given the sums before it."""

    @abstractmethod
    def variance(self, sums: Sums, q: Tensor) -> Tensor:
        """The variance of each coordinate of a read, [B,H,M]."""

    def variance_weights(self, total: Tensor, q: Tensor) -> Tensor | None:
        """Weights w of a variance that is Σ_i w_i A_i, [..., D], which the mean pass can read; None if it is not."""
        del total, q
        return None

    def predict(self, state: State, step: Step) -> State:
        """A ← δA + (1 − δ)A₀, n ← δn + (1 − δ)n₀."""
        log_decay = step["log_decay"]
        (table, total), decay, lost = self.sums(state), log_decay.exp(), -log_decay.expm1()
        to_table, to_total = self.resting(table.shape[-1])
        table = decay[..., None, None] * table + to_table * lost[..., None, None]
        return self.state_of(Sums(table, decay[..., None] * total + to_total * lost[..., None]))

    def condition(self, state: State, k: Tensor, v: Tensor, step: Step) -> Written:
        """A ← A + k vᵀ, n ← n + w(v) k."""
        del step
        before = self.sums(state)
        table = before.table + k[..., :, None] * v[..., None, :]
        after = Sums(table, before.total + self.weight(v)[..., None] * k)
        return Written(self.state_of(after), self.log_density(before, k, v))

    def read(self, state: State, q: Tensor, step: Step) -> Reading:
        """Σ_i q_i A_i / n_i, and its variance."""
        del step
        sums = self.sums(state)
        mean = ((q / sums.total)[..., None] * sums.table).sum(-2)
        return Reading(mean, self.variance(sums, q))

    def passages(self) -> tuple[Passage, ...]:
        """Sums that fade by δ."""
        return (FadingSums(lambda parameters: parameters["log_decay"].exp()),)

    def gain_groups(self, M: int) -> int:
        """Every value column has its own variance."""
        return M

    def sources(self) -> Mapping[str, Source]:
        """Decays from a spectrum: heads start with memories of 10 to 1,000 tokens."""
        return {"log_decay": Spectrum("log_decay")}

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Decay, write and read of the table, and the decay and the division of the totals."""
        return "D·M", 3 * D * M + 3 * D


def positive_fields(design: Any, *names: str) -> None:
    """Refuse fields of a design that are not finite numbers above 0."""
    for name in names:
        value = getattr(design, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and math.isfinite(cast("float", value)) and value > 0):
            raise ValueError(f"{type(design).__name__}({name}): expected a finite number above 0, got {value!r}")


def log_of(x: Tensor) -> Tensor:
    """Log x, finite at x = 0, for products that are 0 there."""
    import torch

    return x.clamp_min(torch.finfo(x.dtype).tiny).log()
