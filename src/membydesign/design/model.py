"""A design model: how memory drifts, what a write observes, and what is kept of the uncertainty."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, final

from membydesign.design.covariance import Covariance, Dense, Diagonal, MeanOnly, PerColumnReset, Reset
from membydesign.design.describe import Description, describe
from membydesign.design.equations import StateSize, StepParameter
from membydesign.design.transition import DampedRotation, Transition
from membydesign.design.write import LatentInput, ObserveMemory, Write

if TYPE_CHECKING:
    from typing import Any

Rule = Literal["kalman", "delta", "additive"]

_PROCESS_NOISE = StepParameter("process_noise", "ℓ_t²", bound=">= 0")
_WRITE_NOISE = StepParameter("write_noise", "r_t²", bound="> 0")
_GROUPED_WRITE_NOISE = StepParameter("write_noise", "r_t²", last_axis="G", optional_axis=True, bound="> 0")
_LATENT_WRITE_NOISE = StepParameter("write_noise", "r_t²", bound=">= 0")
_PRIOR_VARIANCE = StepParameter("prior_variance", "λ_t", bound="> 0")
_COLUMN_PRIOR_VARIANCE = StepParameter("prior_variance", "λ_t,j", last_axis="M", bound="> 0")


@final
@dataclass(frozen=True)
class DesignModel:
    r"""What a memory assumes; everything else is derived from it.

    $$S_t \mid S_{t-1} \sim \text{transition},\qquad v_t \mid S_t \sim \text{write},\qquad
    y_t = \mathrm E[S_t]^\top q_t$$

    The memory $S_t$ is D×M: keys of size D address values of size M. `filter_sequence` and `filter_step` run the
    filter of the design; `describe` states it.

    Args:
        transition: how memory drifts: `Identity`, `ScalarDecay`, `DiagonalDecay`, `DampedRotation`, or your own.
        write: what a write observes: `ObserveMemory` or `LatentInput`.
        covariance: what is kept of the covariance: `Dense`, `Diagonal`, `Reset`, `PerColumnReset` or `MeanOnly`.
        title: what people call it. Title, citation and note do not enter comparisons.
        citation: the paper that it comes from.
        note: what a user should know about the row.

    Raises:
        ValueError: for a combination that has no meaning, with the reason.

    Example:
        >>> design = DesignModel(DampedRotation(noise="real"), ObserveMemory(groups=2), Dense(prior=0.5))
        >>> design.exactness, design.state_size(D=16, M=8)
        ('exact filter', StateSize(mean=128, covariance=512))
    """

    transition: Transition
    write: Write
    covariance: Covariance
    title: str = field(default="A design of your own", compare=False, kw_only=True)
    citation: str = field(default="", compare=False, kw_only=True)
    note: str = field(default="", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, kind in (("transition", Transition), ("write", Write), ("covariance", Covariance)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                hint = f"; write {value.__name__}()" if isinstance(value, type) and issubclass(value, kind) else ""
                raise ValueError(f"DesignModel({name}): expected an instance of {kind.__name__}, got {value!r}{hint}")
        reason = _why_meaningless(self.transition, self.write, self.covariance)
        if reason:
            raise ValueError(f"DesignModel: {reason}")

    @property
    def rule(self) -> Rule:
        """The family of filters that runs it: the folder of `membydesign.ops` that holds its recurrence."""
        if isinstance(self.write, LatentInput):
            return "additive"
        return "delta" if isinstance(self.covariance, (Reset, PerColumnReset)) else "kalman"

    @property
    def exactness(self) -> str:
        """How the filter relates to the exact one: "exact filter", "covariance reset", "diagonal truncation", …"""
        return self.covariance.exactness

    @property
    def is_exact(self) -> bool:
        """Whether mean (and covariance, where one is kept) are those of exact conditioning."""
        return isinstance(self.covariance, (Dense, MeanOnly))

    @property
    def keeps_covariance(self) -> bool:
        """Whether a belief of this design carries a covariance."""
        return isinstance(self.covariance, (Dense, Diagonal))

    @property
    def has_variance(self) -> bool:
        """Whether the variance of a read can be had: from a kept covariance, or from a reset's own λ_t I."""
        return self.keeps_covariance or self.rule == "delta"

    @property
    def step_parameters(self) -> tuple[StepParameter, ...]:
        """What `filter_sequence` must be given for every token and head, besides q, k and v."""
        if self.rule == "additive":
            own = (_PRIOR_VARIANCE, _LATENT_WRITE_NOISE)
        elif isinstance(self.covariance, PerColumnReset):
            own = (_COLUMN_PRIOR_VARIANCE, _WRITE_NOISE)
        elif isinstance(self.covariance, Reset):
            own = (_PRIOR_VARIANCE, _GROUPED_WRITE_NOISE)
        else:
            own = (_PROCESS_NOISE, _GROUPED_WRITE_NOISE)
        return (*self.transition.step_parameters, *own)

    def gain_groups(self, M: int) -> int:
        """How many gains a write has: G, or one for each of the M value columns under `PerColumnReset`."""
        return M if isinstance(self.covariance, PerColumnReset) else self.write.groups

    def state_size(self, D: int, M: int) -> StateSize:
        """Elements kept per head between two tokens, for keys of size D and values of size M."""
        return StateSize(mean=D * M, covariance=self.covariance.elements(D, self.write.groups))

    @property
    def cost_order(self) -> str:
        """The order of work per token and head, in the letters of the legend."""
        if isinstance(self.covariance, Dense):
            return "G·D² + D·M"
        return "G·D + D·M" if isinstance(self.covariance, Diagonal) else "D·M"

    def multiplications(self, D: int, M: int) -> int:
        """Multiplications per token and head of the recurrence, for keys of size D and values of size M.

        Counted: the drift of the mean, what memory predicts at the key (`ObserveMemory`), the rank-one write, the
        read; the drift of the covariance from both sides, the warped key (for `LatentInput`, what the write adds), the
        rank-one downdate. Sums, and terms that do not grow with D, are not.
        """
        drift = self.transition.multiplications_per_entry
        predicts = 1 if isinstance(self.write, ObserveMemory) else 0
        mean = D * M * (drift + predicts + 2)
        if isinstance(self.covariance, Dense):
            return mean + self.write.groups * D * D * (2 * drift + 2)
        if isinstance(self.covariance, Diagonal):
            return mean + self.write.groups * D * (2 * drift + 2)
        return mean + 2 * D

    def describe(self) -> Description:
        """Its equations, exactness, state size and cost, as text (`str`) and as LaTeX (`.latex`)."""
        return describe(self)

    def replace(self, **changes: Any) -> DesignModel:
        """The same design with other components, for example `design.replace(covariance=Reset())`."""
        return replace(self, **changes)


def _why_meaningless(transition: Transition, write: Write, covariance: Covariance) -> str | None:
    asked = transition.step_parameters
    if not isinstance(asked, tuple) or not all(isinstance(p, StepParameter) for p in asked):
        return f"{type(transition).__name__}.step_parameters must be a tuple of StepParameter, and is {asked!r}"
    unknown = [p.name for p in asked if p.name not in ("log_decay", "angle")]
    if unknown:
        return (
            f"the transition {type(transition).__name__} asks for {', '.join(unknown)}, but a step hands it log_decay "
            "and angle; name its parameters so"
        )
    if not isinstance(write, (ObserveMemory, LatentInput)):
        return f"no filter is derived for the write {type(write).__name__}; use ObserveMemory() or LatentInput()"
    if not isinstance(covariance, (Dense, Diagonal, Reset, PerColumnReset, MeanOnly)):
        return f"no filter is derived for the covariance {type(covariance).__name__}; a transition can be your own"
    if isinstance(write, LatentInput) and not isinstance(covariance, (Dense, MeanOnly)):
        return (
            f"LatentInput's mean never reads a covariance, so there is nothing for {type(covariance).__name__} to "
            "approximate; use MeanOnly() to keep none, or Dense() to keep the exact one for the variance of a read"
        )
    if isinstance(write, ObserveMemory) and isinstance(covariance, MeanOnly):
        return (
            "the gain of an ObserveMemory write is read from the covariance, so MeanOnly leaves it undefined; "
            "use Dense(), Diagonal(), Reset() or PerColumnReset()"
        )
    if isinstance(covariance, PerColumnReset) and write.groups > 1:
        return (
            f"PerColumnReset gives every value column a gain of its own, which ObserveMemory(groups={write.groups}) "
            "would group again; use ObserveMemory()"
        )
    has_process_noise = isinstance(write, ObserveMemory) and isinstance(covariance, (Dense, Diagonal))
    if isinstance(transition, DampedRotation) and transition.noise == "real" and not has_process_noise:
        return (
            'DampedRotation(noise="real") says which rows process noise enters, but this design has no process noise; '
            "use DampedRotation()"
        )
    return None
