r"""The linear-Gaussian family: how memory drifts, what a write observes, and what is kept of the uncertainty.

    predict     M̄ = A M,              P̄ = A P Aᵀ + Q
    write       M = M̄ + β u eᵀ,       P = P̄ − β u uᵀ
    read        y = Mᵀ q,             variance qᵀ P q

`Transition` computes A and Q, `Covariance` what is kept of P and the warped key u = P̄ k, `Write` the precision β and
the error e. Nothing here asks for the class of a part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from membydesign.design.covariance import Covariance
from membydesign.design.passage import MeanMap
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Step, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sequence_drift import Drift
from membydesign.design.stationary import Stationary
from membydesign.design.transition import FREE_NOISE, Transition
from membydesign.design.write import Write
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import torch
    from torch import Tensor

    from membydesign.belief import Belief
    from membydesign.design.passage import Passage
    from membydesign.design.sources import Source
    from membydesign.design.write import WriteEvent
    from membydesign.state import Sizes

_DRIFT_OF_MEAN = Equation("M̄_t = A_t M_{t-1}", r"\bar{\mathbf{M}}_t = \mathbf{A}_t \mathbf{M}_{t-1}")
_READ = Equation("y_t = M_tᵀ q_t", r"\mathbf{y}_t = \mathbf{M}_t^\top \mathbf{q}_t")
_LATENT_COVARIANCE = Equation(
    "P_t = A_t P_{t-1} A_tᵀ + ω_t r_t² k_t k_tᵀ",
    r"\mathbf{P}_t = \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top + \omega_t r_t^2 \mathbf{k}_t \mathbf{k}_t^\top",
)


@final
@dataclass(frozen=True)
class DesignModel(Design):
    r"""What a memory assumes; everything else is derived from it.

    $$S_t \mid S_{t-1} \sim \text{transition},\qquad v_t \mid S_t \sim \text{write},\qquad
    y_t = \mathrm E[S_t]^\top q_t$$

    The memory $S_t$ is D×M: keys of size D address values of size M. `filter_sequence` and `filter_step` run the
    filter of the design; `describe` states it.

    Args:
        transition: how memory drifts: `Identity`, `ScalarDecay`, `DiagonalDecay`, `DampedRotation`, or your own.
        write: what a write observes: `ObserveMemory`, `LatentInput`, or your own.
        covariance: what is kept of the covariance: `Dense`, `Diagonal`, `Reset`, `PerColumnReset`, `MeanOnly`, or your
            own.
        title: what people call it. Title, citation and note do not enter comparisons.
        citation: the paper that it comes from.
        note: what a user should know about the row.

    Raises:
        ValueError: for a combination that has no meaning, with the reason.

    Examples:
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
        reason = self._why_meaningless()
        if reason:
            raise ValueError(f"DesignModel: {reason}")

    def __hash__(self) -> int:
        """Computed once, since every decoding step looks its plan up by the design."""
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", hash((self.transition, self.write, self.covariance)))
        return self.__dict__["_hash"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the hash behind, which differs between processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def step_parameters(self) -> tuple[StepParameter, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What `filter_sequence` must be given for every token and head, besides q, k and v."""
        noise = self.transition.noise_parameters if self.has_process_noise else ()
        parts = (self.transition.step_parameters, noise, self.covariance.step_parameters, self.write.step_parameters)
        return tuple(parameter for part in parts for parameter in part)

    @property
    def groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """G, the noise groups of its write."""
        return self.write.groups

    @property
    def exactness(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How the filter relates to the exact one: "exact filter", "covariance reset", "assumed density", …"""
        approximations = [part.exactness for part in (self.write, self.covariance) if part.exactness != "exact filter"]
        return ", ".join(approximations) or "exact filter"

    @property
    def has_process_noise(self) -> bool:
        """Whether the transition's Q_t enters the filter."""
        return self.covariance.predicts and self.write.observes_memory

    @property
    def keeps_covariance(self) -> bool:
        """Whether a belief of this design carries a covariance."""
        return self.covariance.elements(1, 1) > 0

    @property
    def has_variance(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a read has a variance: from a kept covariance, or from a reset's own λ_t I."""
        return self.covariance.has_variance

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Belief:
        """M₀ = 0, and the covariance's own start."""
        import torch

        mean = torch.zeros(sizes, dtype=dtype, device=device)
        kept = self.covariance.initial(sizes, self.groups, dtype=dtype, device=device)
        return self.covariance.belief(mean, kept)

    def predict(self, state: Belief, step: Step) -> Belief:
        """M̄ = A M, P̄ = A P Aᵀ + Q; the covariance in whatever form its class predicts it."""
        mean = self.transition.apply(state.mean, step)
        if mean.shape != state.mean.shape:
            raise ValueError(
                f"{type(self.transition).__name__}.apply: expected to return the shape of x, "
                f"{list(state.mean.shape)}, got {list(mean.shape)}"
            )
        return type(state)(mean, self.covariance.predict(state.covariance, self.drifted(mean, step), step))

    def condition(self, state: Belief, k: Tensor, v: Tensor, step: Step) -> Written:
        """M = M̄ + β u eᵀ, P = P̄ − β u uᵀ."""
        event = self.event(state, v, step)
        return Written(self.after(event, state, k), event.log_density, event.precision)

    def event(self, state: Belief, v: Tensor, step: Step) -> WriteEvent:
        """What writing v, [B,H,M], does to a predicted belief: where it lands, how strongly, and its error."""
        return self.write.event(state.mean, state.covariance, self.covariance, v, step)

    def after(self, event: WriteEvent, state: Belief, k: Tensor) -> Belief:
        """The belief after an event at key k, [B,H,D], from the predicted one."""
        gain = event.precision[..., None] * event.warped_key
        error = event.error.unflatten(-1, (gain.shape[2], -1))
        mean = state.mean + (gain[..., None] * error[..., None, :]).movedim(2, 3).flatten(-2)
        return type(state)(mean, self.covariance.condition(state.covariance, event, k))

    def read(self, state: Belief, q: Tensor, step: Step) -> Reading:
        """y = Mᵀ q, and the variance of each of its coordinates."""
        mean = product(q[..., None, :], state.mean)[..., 0, :]
        if not self.has_variance:
            return Reading(mean)
        return Reading(mean, self.covariance.variance(state.covariance, q, self.write.noise(step), step))

    def drifted(self, mean: Tensor, step: Step) -> Drift:
        """The map from P, [B,H,G,D,D], to A P Aᵀ + Q at a step; only the shape of mean, [B,H,D,M], matters."""
        # the parameters of A with an axis for the noise groups
        parameters = {p.name: step[p.name].unsqueeze(2) for p in self.transition.step_parameters}
        grouped = Step(parameters, step.k.unsqueeze(2))
        noise = self.transition.noise_covariance(mean, step)[:, :, None] if self.has_process_noise else None
        return Drift(lambda x: self.transition.apply(x, grouped), noise)

    def gain_groups(self, M: int) -> int:
        """How many gains a write has: G, or one for each of the M value columns under `PerColumnReset`."""
        return self.covariance.gain_groups(self.groups, M)

    def state_size(self, D: int, M: int) -> StateSize:
        """Elements kept per head between two tokens, for keys of size D and values of size M."""
        return StateSize(mean=D * M, covariance=self.covariance.elements(D, self.groups))

    def refuse_key_size(self, D: int) -> str | None:
        """What D must be, if the transition or the covariance cannot have D rows."""
        return self.transition.refuse_key_size(D) or self.covariance.refuse_key_size(D)

    def observation_noise(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """r² of every write, if it follows from parameters alone."""
        return self.write.noise(parameters)

    def state_flaws(self, state: Belief, *, thorough: bool) -> list[Flaw]:
        """What may be wrong with its covariance."""
        return [] if state.covariance is None else self.covariance.flaws(state.covariance, thorough=thorough)

    def sources(self) -> Mapping[str, Source]:
        """Where a layer takes step parameters from; the covariance has the last word."""
        named = {**self.transition.parameter_sources, **self.write.parameter_sources}
        named.update(self.covariance.parameter_sources if self.write.observes_memory else {})
        needed = {parameter.name for parameter in self.step_parameters}
        return {name: source for name, source in named.items() if name in needed}

    def with_stationary_noise(self) -> DesignModel | None:
        """The same design with noise that returns memory to its prior; None if it has no process noise."""
        if not self.has_process_noise:
            return None
        return self if isinstance(self.transition, Stationary) else self.replace(transition=Stationary(self.transition))

    def layer_key_size(self, D: int) -> int:
        """As the transition has it."""
        return self.transition.layer_key_size(D)

    def layer_keys(self, x: Tensor) -> Tensor:
        """As the transition has it."""
        return self.transition.layer_keys(x)

    def layer_parameters(self, parameters: Mapping[str, Tensor | float]) -> Mapping[str, Tensor | float]:
        """As the transition has it."""
        return self.transition.layer_parameters(parameters)

    def passages(self) -> tuple[Passage, ...] | str:
        """The covariance, which sees no values, then the mean."""
        reason = self.write.why_not_affine()
        if reason is not None:
            return reason
        of_covariance = self.covariance.passage(self.write)
        if isinstance(of_covariance, str):
            return of_covariance
        return (MeanMap(),) if of_covariance is None else (of_covariance, MeanMap())

    def assumptions(self) -> Assumptions:
        """The classes of its three parts."""
        return Assumptions(self.transition.label, type(self.write).__name__, type(self.covariance).__name__)

    def state_formula(self) -> str:
        """The state size in the letters of the legend, such as `D·M + D²`."""
        return " + ".join(filter(None, ("D·M", self.covariance.formula(self.groups))))

    @property
    def cost_order(self) -> str:
        """The order of work per token and head, in the letters of the legend."""
        order, _ = self.covariance.cost(1, self.groups, self.transition.multiplications_per_entry)
        return " + ".join(filter(None, (order, "D·M")))

    def multiplications(self, D: int, M: int) -> int:
        """Multiplications per token and head of the recurrence, for keys of size D and values of size M.

        Counted: the drift of the mean, what memory predicts at the key (if the write observes memory), the rank-one
        write, the read; the drift of the covariance from both sides, the warped key (for `LatentInput`, what the write
        adds), the rank-one downdate. Sums, and terms that do not grow with D, are not.
        """
        drift = self.transition.multiplications_per_entry
        _, of_covariance = self.covariance.cost(D, self.groups, drift)
        return D * M * (drift + int(self.write.observes_memory) + 2) + of_covariance

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """`cost_order` and `multiplications`."""
        return self.cost_order, self.multiplications(D, M)

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Its equations by heading."""
        if self.write.observes_memory:
            kept = [equation.with_term(FREE_NOISE, self.transition.noise_law) for equation in self.covariance.equations]
            return (
                ("memory drifts", (self._drift_law(), self.transition.matrix)),
                ("a write observes", self.write.density),
                ("predict", (_DRIFT_OF_MEAN, *kept[:1])),
                ("write", (*self.write.update, *kept[1:])),
                ("read", (_READ,)),
            )
        return (
            ("a write observes", self.write.density),
            ("memory drifts", (self.transition.matrix,)),
            ("predict", (_DRIFT_OF_MEAN,)),
            ("write", (*self.write.update, *((_LATENT_COVARIANCE,) if self.keeps_covariance else ()))),
            ("read", (_READ,)),
        )

    def _drift_law(self) -> Equation:
        noise, rows = self.transition.noise_law, self.transition.process_noise_shape
        law = Equation(
            f"S_t | S_{{t-1}} ~ N(A_t S_{{t-1}}, {noise.text})",
            r"\mathbf{S}_t \mid \mathbf{S}_{t-1} \sim "
            rf"\mathcal{{N}}(\mathbf{{A}}_t \mathbf{{S}}_{{t-1}},\ {noise.latex})",
        )
        if rows is None:
            return law
        return Equation(f"{law.text},  N = {rows.text}", rf"{law.latex},\quad \mathbf{{N}} = {rows.latex}")

    def summary(self) -> str:
        """Its three parts."""
        return f"{self.transition}, {self.write}, {self.covariance}"

    def replace(self, **changes: Any) -> DesignModel:
        """The same design with other components, for example `design.replace(covariance=Reset())`."""
        return replace(self, **changes)

    def _why_meaningless(self) -> str | None:
        transition, write, covariance = self.transition, self.write, self.covariance
        for part in (transition, write, covariance):
            declared = part.step_parameters
            if not isinstance(declared, tuple) or not all(isinstance(p, StepParameter) for p in declared):
                return f"{type(part).__name__}.step_parameters must be a tuple of StepParameter, and is {declared!r}"
        if write.observes_memory and not covariance.has_gain:
            return (
                f"the gain of an {type(write).__name__} write is read from the covariance, so "
                f"{type(covariance).__name__} leaves it undefined; use Dense(), Diagonal(), Reset() or PerColumnReset()"
            )
        if not write.observes_memory and covariance.exactness != "exact filter":
            return (
                f"{type(write).__name__}'s mean never reads a covariance, so there is nothing for "
                f"{type(covariance).__name__} to approximate; use MeanOnly() to keep none, or Dense() to keep the "
                "exact one for the variance of a read"
            )
        reason = covariance.refuse_write(write) or (
            None if self.has_process_noise else transition.refuse_without_noise()
        )
        if reason is not None:
            return reason
        names = [parameter.name for parameter in self.step_parameters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            return f"two parts ask for a step parameter named {', '.join(twice)}; rename one of them"
        return None
