r"""Preconditioned (Gated) DeltaNet: the step of a delta rule, scaled row by row with the curvature of what was written.

c_t = γ_t c_{t-1} + η_t k_t ⊙ k_t                        the diagonal of Σ k kᵀ, fading
s_t = x^{−r/(1+|r|)},   r = log(c_t + ε) − ς_t           between 1/x and x: small where much was written
M_t = M̄_t + β_t (s_t ⊙ k_t) (v_t − M̄_tᵀ k_t)ᵀ,   M̄_t = a_t M_{t-1}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from membydesign.design.linear_recurrence import READ, SCALAR_DECAY, Accumulate, ChosenGain, Recurrence, Writes
from membydesign.design.passage import FadingSums, MeanMap, Passage
from membydesign.design.protocol import Assumptions, Flaw, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Learned, Source, Spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from membydesign.design.protocol import Step
    from membydesign.state import Sizes


class Curved(NamedTuple):
    """A mean, and how much was written along each row.

    Attributes:
        mean: M, [B,H,D,M].
        curvature: c, [B,H,D].
    """

    mean: Tensor
    curvature: Tensor


@dataclass(frozen=True)
class PreconditionedDelta(ChosenGain):
    r"""The recurrence of Preconditioned (Gated) DeltaNet.

    $$c_t = \gamma_t c_{t-1} + \eta_t\, k_t \odot k_t, \qquad
    s_t = x^{-r_t/(1+|r_t|)}, \quad r_t = \log(c_t + \epsilon) - \varsigma_t$$
    $$\bar M_t = a_t M_{t-1}, \qquad M_t = \bar M_t + \beta_t (s_t \odot k_t)(v_t - \bar M_t^\top k_t)^\top$$

    The curvature c is the diagonal of the information that a recursive least-squares filter accumulates. The filter
    would write along $P k$ with $P$ the inverse of the whole matrix; here a squashed inverse of its diagonal takes the
    place of P, and the step size β that of $1/(r^2 + k^\top P k)$. So correlations between rows are discarded, and the
    size of the inverse is kept between 1/x and x.

    Args:
        range: x ≥ 1, how far a step may be scaled down or up; 1 is Gated DeltaNet. At most 2, so that with unit keys
            no step overshoots by more than what it corrects.
        eps: ε > 0, the curvature of a row that was never written.

    Step parameters: `log_decay` log a [B,T,H], at most 0; `gate` β [B,T,H] in [0, 1]; `curvature_log_decay` log γ
    [B,T,H], at most 0; `curvature_gate` η [B,T,H] in [0, 1]; `log_center` ς [B,T,H], the log curvature at which a step
    is not scaled. Keys should have length one.
    """

    range: float = 1.5
    eps: float = 1e-6
    title = "Preconditioned Gated DeltaNet"
    citation = (
        "Tumma, Loo & Rus, Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences, "
        "arXiv:2604.21100, 2026"
    )
    note = (
        "keeps the diagonal of Σ k kᵀ and squashes its inverse into [1/x, x], x = 1.5; range=1 is Gated DeltaNet; the "
        "Bayesian Layer's recursive least squares keeps all of it"
    )
    step_parameters = (
        StepParameter("log_decay", "log a_t", bound="<= 0"),
        StepParameter("gate", "β_t", bound="[0, 1]", idle=0.0),
        StepParameter("curvature_log_decay", "log γ_t", bound="<= 0"),
        StepParameter("curvature_gate", "η_t", bound="[0, 1]", idle=0.0),
        StepParameter("log_center", "ς_t"),
    )

    def __post_init__(self) -> None:
        for name, low, high in (("range", 1.0, 2.0), ("eps", 0.0, math.inf)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not low <= value <= high or value == 0:
                limits = "from 1 to 2" if name == "range" else "above 0"
                raise ValueError(f"PreconditionedDelta({name}): expected a finite number {limits}, got {value!r}")

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Curved:
        """Zeros."""
        import torch

        mean = torch.zeros(sizes, dtype=dtype, device=device)
        return Curved(mean, torch.zeros(sizes[:3], dtype=dtype, device=device))

    def state_of(self, matrix: Tensor, kept: Any) -> Curved:
        """M and c."""
        return Curved(matrix, kept)

    def log_decay(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Of all rows together."""
        return parameters["log_decay"][..., None]

    def scale(self, curvature: Tensor, log_center: Tensor) -> Tensor:
        """s, between 1/x and x, for curvatures [..., D] and centers [...]."""
        r = (curvature + self.eps).log() - log_center[..., None]
        return (-math.log(self.range) * r / (1 + r.abs())).exp()

    def writes(self, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], kept: Tensor) -> Writes:
        """One write along s ⊙ k, with the curvature `kept` that includes k."""
        direction = parameters["gate"][..., None] * self.scale(kept, parameters["log_center"]) * k
        return Writes(k[..., None, :], direction[..., None, :], v[..., None, :])

    def predict(self, state: Curved, step: Step) -> Curved:
        """M̄ = a M, and c̄ = γ c."""
        fading = step["curvature_log_decay"].exp()[..., None]
        return super().predict(state, step)._replace(curvature=fading * state.curvature)

    def condition(self, state: Curved, k: Tensor, v: Tensor, step: Step) -> Written:
        """Take the key into the curvature, then write."""
        curvature = state.curvature + step["curvature_gate"][..., None] * k.square()
        return super().condition(Curved(state.mean, curvature), k, v, step)

    def recurrence(
        self, state: Curved, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], accumulate: Accumulate
    ) -> Recurrence:
        """The curvatures of all tokens first, then their writes."""
        added = parameters["curvature_gate"][..., None] * k.square()
        curvature = accumulate(state.curvature, parameters["curvature_log_decay"], added)
        key, direction, value = self.writes(k, v, parameters, curvature)
        # not a view of all tokens, which would keep them alive
        return Recurrence(self.log_decay(parameters), direction, value, key, kept=curvature[:, -1].clone())

    def passages(self) -> tuple[Passage, ...]:
        """The curvature, which fades by γ, then the mean."""
        curvature = FadingSums(lambda parameters: parameters["curvature_log_decay"].exp(), ("curvature",))
        return (curvature, MeanMap(per_column="value"))

    def sources(self) -> dict[str, Source]:
        """Decays from a spectrum, and the published start of the center."""
        return {"log_decay": Spectrum("log_decay"), "log_center": Learned(-0.2)}

    def state_flaws(self, state: Curved, *, thorough: bool) -> list[Flaw]:
        """Negative curvatures."""
        del thorough
        c = state.curvature
        return [Flaw("curvature", "values of at least 0", c < 0, lambda _: f"{c.min().item():.3g}")]

    def state_size(self, D: int, M: int) -> StateSize:
        """M and c."""
        return StateSize(mean=D * M, covariance=D)

    def state_formula(self) -> str:
        """M and c."""
        return "D·M + D"

    def assumptions(self) -> Assumptions:
        """A squashed diagonal of the information in the place of a covariance."""
        return Assumptions("ScalarDecay", "GradientStep", "DiagonalCurvature")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Curvature, scale, decay, correction, read."""
        return (
            (
                "curvature",
                (
                    Equation(
                        "c_t = γ_t c_{t-1} + η_t k_t ⊙ k_t",
                        r"\mathbf{c}_t = \gamma_t \mathbf{c}_{t-1} + \eta_t \mathbf{k}_t \odot \mathbf{k}_t",
                    ),
                    Equation(
                        f"s_t = {self.range:g}^(−r/(1+|r|)),  r = log(c_t + ε) − ς_t",
                        rf"\mathbf{{s}}_t = {self.range:g}^{{-\mathbf{{r}}/(1+|\mathbf{{r}}|)}},\quad "
                        r"\mathbf{r} = \log(\mathbf{c}_t + \epsilon) - \varsigma_t",
                    ),
                ),
            ),
            ("predict", (SCALAR_DECAY,)),
            (
                "write",
                (
                    Equation(
                        "M_t = M̄_t + β_t (s_t ⊙ k_t) (v_t − M̄_tᵀ k_t)ᵀ",
                        r"\mathbf{M}_t = \bar{\mathbf{M}}_t + \beta_t (\mathbf{s}_t \odot \mathbf{k}_t) "
                        r"(\mathbf{v}_t - \bar{\mathbf{M}}_t^\top \mathbf{k}_t)^\top",
                    ),
                ),
            ),
            ("read", (READ,)),
        )
