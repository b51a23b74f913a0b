r"""Counts: a Gamma belief about the rates of Poisson events, with prior, forgetting and exact evidence.

λ_ij ~ Gamma(a₀, b₀)                                              before anything is written
λ_t = λ_{t-1} η/δ_t,   η ~ Beta(δ_t a, (1 − δ_t) a)               forget:   ā = δ_t a,      b̄ = δ_t b
n_ij | λ_ij ~ Poisson(k_i λ_ij),   n_ij = k_i v_j                 write:    a = ā + k vᵀ,   b = b̄ + k
p(n | past) = Π_ij NegativeBinomial(n_ij; ā_ij, b̄_i/(b̄_i + k_i))
y_j = E Σ_i q_i λ_ij = Σ_i q_i a_ij / b_i                         read, with variance Σ_i q_i² a_ij / b_i²
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.design.additive import AdditiveDesign, Sums, log_of, positive_fields
from membydesign.design.protocol import Assumptions
from membydesign.design.schema import Equation, StateSize

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from membydesign.state import Sizes


class Counts(NamedTuple):
    """What every slot has seen.

    Attributes:
        events: a, the events of each slot and column, [B,H,D,M].
        exposure: b, the exposure of each slot, [B,H,D].
    """

    events: Tensor
    exposure: Tensor


@dataclass(frozen=True)
class CountMemory(AdditiveDesign):
    r"""Gamma–Poisson counts: $\lambda_{ij} \sim \mathrm{Gamma}(a_{ij}, b_i)$.

    $$a_t = \delta_t a_{t-1} + k_t v_t^\top, \qquad b_t = \delta_t b_{t-1} + k_t, \qquad
    y_t = \sum_i q_i\, a_i / b_i$$

    Row i of memory is a slot with a rate $\lambda_{ij}$ of events for each value column j. A write watches slot i for
    the exposure $k_i \ge 0$ and counts $k_i v_j \ge 0$ events there. It is linear attention, normalised by the exposure
    that each slot has had, prior included: an unwritten slot is read as $a_0/b_0$, with the prior's variance.

    Forgetting, $\lambda_t = \lambda_{t-1}\,\eta/\delta_t$ with $\eta \sim \mathrm{Beta}(\delta_t a, (1-\delta_t) a)$,
    keeps every mean and widens it. Everything is conjugate, hence exact.

    The log evidence is that of the counts $n_{ij} = k_i v_j$, which are negative binomial. For one-hot keys and whole
    values that is $\log p(v_t \mid v_{<t})$. Where counts are not whole numbers, Γ functions continue the density: it
    scores writes but is not normalised.

    A slot without any exposure loses a and b together. After about 80/(1 − δ) such tokens both underflow in float32,
    and the filter raises `NonFiniteError`. The softmax keys of a `MemoryLayer` always leave some exposure.

    Args:
        events: a₀ > 0, the events of every slot and column before anything is written.
        exposure: b₀ > 0, the exposure of every slot.

    Step parameters: `log_decay` log δ [B,T,H], at most 0.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 100, 2, 16).unbind()
        >>> out = filter_sequence(CountMemory(), q, k, v, log_decay=-0.01, return_variance=True)
        >>> out.belief.events.shape, out.belief.exposure.shape, out.variance.shape
        (torch.Size([1, 2, 16, 16]), torch.Size([1, 2, 16]), torch.Size([1, 100, 2, 16]))
    """

    events: float = 1.0
    exposure: float = 1.0
    title = "Count memory (Gamma–Poisson)"
    citation = "Smith & Miller, JRSS B 1986; Harvey & Fernandes, JBES 1989"
    note = (
        "use it for rates and frequencies, or as linear attention with an exact normaliser and a variance for each "
        "read; keys, queries and values are at least 0"
    )

    def __post_init__(self) -> None:
        positive_fields(self, "events", "exposure")

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Counts:
        """Gamma(a₀, b₀) for every slot and column."""
        import torch

        events = torch.full(sizes, self.events, dtype=dtype, device=device)
        return Counts(events, torch.full(sizes[:3], self.exposure, dtype=dtype, device=device))

    def sums(self, state: Counts) -> Sums:
        """Events and exposure."""
        return Sums(*state)

    def state_of(self, sums: Sums) -> Counts:
        """Events and exposure."""
        return Counts(*sums)

    def weight(self, v: Tensor) -> Tensor:
        """1: the exposure is that of the key, whatever was counted."""
        return v.new_ones(()).expand(v.shape[:-1])

    def resting(self, M: int) -> tuple[float, float]:
        """0: forgetting keeps a/b."""
        del M
        return 0.0, 0.0

    def log_density(self, predicted: Sums, k: Tensor, v: Tensor) -> Tensor:
        """Negative binomial, for every slot and column."""
        a, b = predicted
        counted, in_slot = k[..., None] * v[..., None, :], k * v.sum(-1, keepdim=True)
        ways = ((a + counted).lgamma() - a.lgamma() - (counted + 1).lgamma()).sum(-1)
        return (ways - a.sum(-1) * (k / b).log1p() + in_slot * (log_of(k) - (b + k).log())).sum(-1)

    def variance(self, sums: Sums, q: Tensor) -> Tensor:
        """Σ_i q_i² a_ij / b_i²."""
        return (self.variance_weights(sums.total, q)[..., None] * sums.table).sum(-2)

    def variance_weights(self, total: Tensor, q: Tensor) -> Tensor:
        """q_i² / b_i²: the variance is linear in the events."""
        return (q / total).square()

    def state_size(self, D: int, M: int) -> StateSize:
        """a and b."""
        return StateSize(mean=D * M, covariance=D)

    def state_formula(self) -> str:
        """a and b."""
        return "D·M + D"

    def assumptions(self) -> Assumptions:
        """A discounted Gamma belief about Poisson rates."""
        return Assumptions("Discount", "Poisson", "Gamma")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """The Gamma–Poisson model, its update and its read."""
        return (
            (
                "memory drifts",
                (
                    Equation(
                        "λ_t = λ_{t-1} η / δ_t,  η ~ Beta(δ_t a, (1 − δ_t) a)",
                        r"\lambda_t = \lambda_{t-1}\, \eta / \delta_t,\quad "
                        r"\eta \sim \mathrm{Beta}(\delta_t a,\ (1 - \delta_t) a)",
                    ),
                ),
            ),
            (
                "a write observes",
                (
                    Equation(
                        "k_i v_j | λ_ij ~ Poisson(k_i λ_ij),  λ_ij ~ Gamma(a_ij, b_i)",
                        r"k_i v_j \mid \lambda_{ij} \sim \mathrm{Poisson}(k_i \lambda_{ij}),\quad "
                        r"\lambda_{ij} \sim \mathrm{Gamma}(a_{ij}, b_i)",
                    ),
                ),
            ),
            (
                "predict",
                (
                    Equation(
                        "ā = δ_t a_{t-1},  b̄ = δ_t b_{t-1}",
                        r"\bar a = \delta_t a_{t-1},\quad \bar b = \delta_t b_{t-1}",
                    ),
                ),
            ),
            (
                "write",
                (
                    Equation(
                        "a_t = ā + k_t v_tᵀ,  b_t = b̄ + k_t",
                        r"a_t = \bar a + \mathbf{k}_t \mathbf{v}_t^\top,\quad b_t = \bar b + \mathbf{k}_t",
                    ),
                ),
            ),
            ("read", (Equation("y_t = Σ_i q_i a_i / b_i", r"\mathbf{y}_t = \sum_i q_i\, a_i / b_i"),)),
        )
