r"""A memory that learns the scale of its own errors: a linear-Gaussian design with an unknown factor of all variances.

The filter of the wrapped design is unchanged, since a common factor cancels in its gains. Two numbers per noise group
count how well values were predicted:

    S | τ ~ N(M, τ⁻¹ P),   v | S, τ ~ N(Sᵀ k, τ⁻¹ r² I),   τ ~ Gamma(a, b)
    forget      ā = δ a,  b̄ = δ b                          (only with `discount`)
    write       a = ā + m/2,   b = b̄ + ½ β ‖v − M̄ᵀ k‖²      m columns in a group
    read        y = Mᵀ q,   variance  b/(a − 1) · qᵀ P q
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from membydesign.belief import ScaledBelief, innovation_squares, student_t_log_density
from membydesign.design.model import DesignModel
from membydesign.design.passage import FadingSums, Inside, Passage
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Step, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Learned
from membydesign.design.write import Write

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from membydesign.design.schema import Bound
    from membydesign.design.sources import Source
    from membydesign.state import Sizes

DISCOUNT = StepParameter("discount", "δ_t", bound="[0, 1]")
COLUMNS_WITH_DISCOUNT = 3
"""From a group of this many columns, a single write has a Student-t with a variance: a ≥ 3/2 whatever was forgotten."""

_PRECISION = Equation("τ ~ Gamma(a_0, b_0)", r"\tau \sim \mathrm{Gamma}(a_0, b_0)")
_GIVEN = Equation(
    "given τ, every variance above is divided by τ",
    r"\text{given } \tau \text{, every variance above is divided by } \tau",
)
_FORGET = Equation(
    "ā_t = δ_t a_{t-1},  b̄_t = δ_t b_{t-1}", r"\bar a_t = \delta_t a_{t-1},\quad \bar b_t = \delta_t b_{t-1}"
)
_VARIANCE = Equation(
    "variance of each coordinate: b_t / (a_t − 1) · q_tᵀ P_t q_t",
    r"\mathrm{Var}(S_t^\top \mathbf{q}_t) = \frac{b_t}{a_t - 1}\, \mathbf{q}_t^\top \mathbf{P}_t \mathbf{q}_t",
)


class Scale(NamedTuple):
    """a and b of τ ~ Gamma(a, b) after writes, and how expected the writes were.

    Attributes:
        shape: a after each write.
        rate: b after each write.
        log_evidence: log p(v | past), without the axis of groups.
    """

    shape: Tensor
    rate: Tensor
    log_evidence: Tensor


@final
@dataclass(frozen=True)
class UnknownScale(Design):
    r"""A linear-Gaussian memory whose variances are known up to one factor, with a belief about that factor.

    $$S_t \mid \tau \sim \mathcal N(M_t, \tau^{-1} P_t),\qquad v_t \mid S_t, \tau \sim
    \mathcal N(S_t^\top k_t, \tau^{-1} r_t^2 I),\qquad \tau \sim \mathrm{Gamma}(a_0, b_0)$$

    with a τ for each head and noise group (normal–inverse-gamma). Means, gains and P are those of `base`, in which only
    ratios of variances matter. Every write of m columns adds m/2 to a and $\tfrac12 \beta_t \lVert v_t - \bar M_t^\top
    k_t \rVert^2$ to b. Predictive densities are Student-t with 2a degrees of freedom, and the variance of a read is
    $\frac{b}{a-1} q^\top P q$: unlike $q^\top P q$ alone, it depends on how well values were predicted.

    Args:
        base: a `DesignModel` with a Gaussian write that observes memory (`ObserveMemory`) and a kept covariance.
        shape: a₀ > 1. The Student-t of a read has a variance only if a > 1, hence the bound; a never falls without a
            discount. Larger numbers trust b₀ for longer: a₀ counts as 2·a₀ observed values.
        rate: b₀ > 0. Variances start out b₀/(a₀ − 1) times those of `base`: the same by default.
        discount: whether old errors are forgotten: adds a step parameter `discount` δ_t in [0, 1], [B,T,H], and
            (a, b) ← (δ_t a, δ_t b) before the write. b/a is kept and its certainty falls. This lets the scale drift, at
            the price of exactness: memory is taken to be rescaled along with τ. Needs groups of 3 columns or more, so
            that a > 1 after every write. At δ_t = 0 nothing is known about the scale before the write, which therefore
            has no density: log evidence raises `NonFiniteError`.
        title: what people call it. Title, citation and note do not enter comparisons.
        citation: the paper that it comes from.
        note: what a user should know about it.

    Step parameters: those of `base`, and `discount`.

    Examples:
        >>> design = UnknownScale(catalogue["bayesian_layer"])
        >>> design.exactness, design.state_size(D=16, M=8)
        ('exact filter', StateSize(mean=128, covariance=258))
    """

    base: DesignModel
    shape: float = 2.0
    rate: float = 1.0
    discount: bool = False
    title: str = field(default="", compare=False, kw_only=True)
    citation: str = field(default="", compare=False, kw_only=True)
    note: str = field(default="", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        reason = _why_not(self.base)
        if reason is not None:
            raise ValueError(f"UnknownScale(base): expected {reason}")
        for name, value, least in (("shape", self.shape, 1), ("rate", self.rate, 0)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (math.isfinite(value) and value > least):
                raise ValueError(f"UnknownScale({name}): expected a finite number above {least}, got {value!r}")
        if not isinstance(self.discount, bool):
            raise ValueError(f"UnknownScale(discount): expected True or False, got {self.discount!r}")
        if not self.title:
            object.__setattr__(self, "title", f"{self.base.title}, unknown scale")

    @property
    def step_parameters(self) -> tuple[StepParameter, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the base, and `discount`."""
        return (*self.base.step_parameters, DISCOUNT) if self.discount else self.base.step_parameters

    @property
    def wrapped(self) -> DesignModel:
        """The base."""
        return self.base

    def rewrap(self, wrapped: Design) -> UnknownScale:
        """The unknown scale of another base."""
        assert isinstance(wrapped, DesignModel)
        return self.replace(base=wrapped)

    @property
    def groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """G, the noise groups of the base."""
        return self.base.groups

    @property
    def exactness(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The base's; a discount makes it an assumed density filter."""
        own = self.base.exactness
        if not self.discount:
            return own
        return "assumed density" if own == "exact filter" else f"{own}, assumed density"

    @property
    def has_variance(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Always, since the base keeps a covariance."""
        return True

    @property
    def key_bound(self) -> Bound:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The base's."""
        return self.base.key_bound

    @property
    def value_bound(self) -> Bound:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The base's."""
        return self.base.value_bound

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> ScaledBelief:
        """The base's prior, a₀ and b₀."""
        import torch

        per_group = (sizes.batch, sizes.heads, self.gain_groups(sizes.M))
        shape, rate = (torch.full(per_group, x, dtype=dtype, device=device) for x in (self.shape, self.rate))
        return ScaledBelief(self.base.prior(sizes, dtype=dtype, device=device), shape, rate)

    def predict(self, state: ScaledBelief, step: Step) -> ScaledBelief:
        """The base drifts; a discount forgets a share of a and b."""
        base = self.base.predict(state.base, step)
        if not self.discount:
            return ScaledBelief(base, state.shape, state.rate)
        kept = step["discount"][..., None]
        return ScaledBelief(base, kept * state.shape, kept * state.rate)

    def condition(self, state: ScaledBelief, k: Tensor, v: Tensor, step: Step) -> Written:
        """The base's update; a and b count the columns and their squared errors."""
        event = self.base.event(state.base, v, step)
        squares = innovation_squares(event.error, event.precision)
        scale = self.observed(squares, event.precision, state.shape, state.rate, v.shape[-1])
        base = self.base.after(event, state.base, k)
        return Written(ScaledBelief(base, scale.shape, scale.rate), scale.log_evidence, event.precision)

    def observed(self, squares: Tensor, precision: Tensor, shape: Tensor, rate: Tensor, M: int) -> Scale:
        """What writes tell about the scale.

        Args:
            squares: β‖v − M̄ᵀk‖² of each write and group, [..., G].
            precision: β, [..., G].
            shape: a before the write, [..., G].
            rate: b before the write, [..., G].
            M: value columns.
        """
        columns = M // precision.shape[-1]
        evidence = student_t_log_density(squares, precision, shape, rate, columns)
        return Scale(shape + columns / 2, rate + squares / 2, evidence)

    def read(self, state: ScaledBelief, q: Tensor, step: Step) -> Reading:
        """The base's read, its variance times b/(a − 1)."""
        mean, variance = self.base.read(state.base, q, step)
        assert variance is not None
        return Reading(mean, state.scale * variance)

    def gain_groups(self, M: int) -> int:
        """The base's."""
        return self.base.gain_groups(M)

    def state_size(self, D: int, M: int) -> StateSize:
        """The base's, and two numbers for each group."""
        mean, covariance = self.base.state_size(D, M)
        return StateSize(mean, covariance + 2 * self.gain_groups(M))

    def state_formula(self) -> str:
        """The base's, and two numbers for each group."""
        return f"{self.base.state_formula()} + {2 * self.groups}"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """The base's: what is added does not grow with D."""
        return self.base.cost(D, M)

    def refuse_key_size(self, D: int) -> str | None:
        """As the base has it."""
        return self.base.refuse_key_size(D)

    def refuse_value_size(self, M: int) -> str | None:
        """As the base has it; a discount needs groups that a single write tells enough about."""
        reason = self.base.refuse_value_size(M)
        if reason is None and self.discount and M // self.gain_groups(M) < COLUMNS_WITH_DISCOUNT:
            return f"at least {COLUMNS_WITH_DISCOUNT} columns for each noise group with a discount, so that a > 1"
        return reason

    def observation_noise(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """r², before scaling."""
        return self.base.observation_noise(parameters)

    def state_flaws(self, state: ScaledBelief, *, thorough: bool) -> list[Flaw]:
        """The base's, a ≤ 1, and b ≤ 0."""
        flaws = [
            flaw._replace(part=f"base.{flaw.part}") for flaw in self.base.state_flaws(state.base, thorough=thorough)
        ]
        for name, value, least in (("shape", state.shape, 1), ("rate", state.rate, 0)):
            flaws.append(
                Flaw(
                    name,
                    f"numbers above {least}",
                    value <= least,
                    lambda index, value=value: f"{value[tuple(index)].item():.6g} at index {index}",
                )
            )
        return flaws

    def sources(self) -> Mapping[str, Source]:
        """The base's, and a discount that starts by forgetting one hundredth per token."""
        return {**self.base.sources(), **({"discount": Learned(0.99)} if self.discount else {})}

    def with_stationary_noise(self) -> UnknownScale | None:
        """The same around a base with such noise; None if it has no process noise."""
        base = self.base.with_stationary_noise()
        return None if base is None else self.replace(base=base)

    def layer_key_size(self, D: int) -> int:
        """As the base has it."""
        return self.base.layer_key_size(D)

    def layer_keys(self, x: Tensor) -> Tensor:
        """As the base has it."""
        return self.base.layer_keys(x)

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """The base's, with the scale after what it scales."""
        added = {
            "a write observes": (_PRECISION, _GIVEN),
            "predict": (_FORGET,) if self.discount else (),
            "write": (self._count(),),
            "read": (_VARIANCE,),
        }
        return tuple((heading, (*equations, *added.get(heading, ()))) for heading, equations in self.base.equations())

    def _count(self) -> Equation:
        columns = "M" if self.groups == 1 else f"M/{self.groups}"
        a, b = ("ā_t", "b̄_t") if self.discount else ("a_{t-1}", "b_{t-1}")
        latex_a, latex_b = (r"\bar a_t", r"\bar b_t") if self.discount else (a, b)
        return Equation(
            f"a_t = {a} + {columns}/2,  b_t = {b} + ½ β_t ‖v_t − M̄_tᵀ k_t‖²",
            rf"a_t = {latex_a} + \tfrac12 {columns},\quad b_t = {latex_b} + \tfrac12 \beta_t "
            r"\lVert \mathbf{v}_t - \bar{\mathbf{M}}_t^\top \mathbf{k}_t \rVert^2",
        )

    def passages(self) -> tuple[Passage, ...] | str:
        """The base's, then a and b, which are sums of what the base's errors are."""
        of_base = self.base.passages()
        if isinstance(of_base, str):
            return of_base
        scale = FadingSums(self._factor, ("shape", "rate"))
        return (*(Inside("base", passage) for passage in of_base), scale)

    def _factor(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """δ of every token; 1 without a discount."""
        noise = self.base.write.noise(parameters)
        assert noise is not None
        return parameters["discount"] if self.discount else noise.new_ones(noise.shape[:-1])

    def assumptions(self) -> Assumptions:
        """The base's, with the scale next to the covariance."""
        transition, write, covariance = self.base.assumptions()
        return Assumptions(transition, write, f"{covariance}, scale")

    def summary(self) -> str:
        """The base's parts, and the prior of the scale."""
        discount = ", discount" if self.discount else ""
        return f"{self.base.summary()}, UnknownScale(shape={self.shape:g}, rate={self.rate:g}{discount})"

    def replace(self, **changes: Any) -> UnknownScale:
        """The same design with other fields; those of a `DesignModel` are replaced in its base."""
        of_base = {name: changes.pop(name) for name in ("transition", "write", "covariance") if name in changes}
        return replace(self, base=changes.pop("base", self.base).replace(**of_base), **changes)


def _why_not(base: object) -> str | None:
    """What to expect instead, and what was given, if a base has no scale to learn; None if it has."""
    if not isinstance(base, DesignModel):
        return f"a DesignModel, such as catalogue['bayesian_layer'], got {base!r}"
    write = type(base.write)
    if not base.write.observes_memory or write.noise is Write.noise:
        return f"a Gaussian write that observes memory, such as ObserveMemory(), got {write.__name__}()"
    if not base.keeps_covariance:
        return (
            "a covariance that is kept, such as Dense(), whose variances share the unknown scale, "
            f"got {type(base.covariance).__name__}()"
        )
    if any(parameter.name == DISCOUNT.name for parameter in base.step_parameters):
        return f"no step parameter named {DISCOUNT.name}, which is that of the scale; rename the one of {base.title}"
    return None
