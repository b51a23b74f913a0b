r"""Memories in which every row explains a written value alone: Kalman Linear Attention and Palimpsa.

A write is taken as D observations at once, one for each row, that know nothing of each other:

    v_j | S_ij ~ N(k_i S_ij, r_j²)          for every row i and column j, independently
    λ_ij = λ̄_ij + k_i² / r_j²               precision of each entry
    η_ij = η̄_ij + k_i v_j / r_j²            information of each entry
    M_ij = η_ij / λ_ij                      the belief S_ij ~ N(M_ij, 1/λ_ij)
    y_j = Σ_i q_i M_ij,   variance Σ_i q_i² / λ_ij

So there are D·M scalar Kalman filters and no error that rows share: a key that spreads over two rows writes the whole
value in both. In return a precision is kept for each entry, and the noise of a write may differ between columns.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from membydesign.design.passage import FadingSums, Passage
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Step, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Learned, Spectrum
from membydesign.errors import NotPositiveDefiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design.sources import Source
    from membydesign.state import Sizes

_WRITE_NOISE = StepParameter("write_noise", "r_t²", axes=("M",), optional_axes=True, bound="> 0")
_DENSITY = Equation(
    "v_j | S_ij ~ N(k_i S_ij, r_j²) for each row i alone",
    r"v_j \mid S_{ij} \sim \mathcal{N}(k_i S_{ij},\ r_j^2) \text{ for each row } i \text{ alone}",
)
_WRITE = (
    Equation("λ_ij = λ̄_ij + k_i² / r_j²", r"\lambda_{ij} = \bar\lambda_{ij} + k_i^2 / r_j^2"),
    Equation("η_ij = η̄_ij + k_i v_j / r_j²", r"\eta_{ij} = \bar\eta_{ij} + k_i v_j / r_j^2"),
)
_READ = Equation("y_j = Σ_i q_i η_ij / λ_ij", r"y_j = \sum_i q_i\, \eta_{ij} / \lambda_{ij}")


class EntryBelief(NamedTuple):
    """What is believed of every entry of a memory, apart from all others.

    Attributes:
        information: η, [B,H,D,M].
        precision: λ, [B,H,D,M].
    """

    information: Tensor
    precision: Tensor

    @property
    def mean(self) -> Tensor:
        """M = η/λ, [B,H,D,M]."""
        return self.information / self.precision


class EntryDesign(Design):
    """D·M scalar Kalman filters in information form. Derive from it and say how entries drift (`predict`).

    The log evidence is that of the D·M observations which this model sees in a write. It scores writes, but it counts
    each value D times and so is no density of v.

    Step parameters: `write_noise` r² > 0, [B,T,H] or [B,T,H,M].
    """

    exactness = "rows apart"
    step_parameters = (_WRITE_NOISE,)
    has_variance = True

    @abstractmethod
    def predict(self, state: EntryBelief, step: Step) -> EntryBelief:
        """η̄ and λ̄."""

    def prior_precision(self) -> float:
        """λ before anything is written."""
        return 1.0

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> EntryBelief:
        """N(0, 1/λ₀) for every entry."""
        precision = torch.full(sizes, self.prior_precision(), dtype=dtype, device=device)
        return EntryBelief(torch.zeros_like(precision), precision)

    def condition(self, state: EntryBelief, k: Tensor, v: Tensor, step: Step) -> Written:
        """λ ← λ̄ + k²/r², η ← η̄ + k v/r²."""
        key, noise = k[..., :, None], step["write_noise"][..., None, :]
        value = v[..., None, :]
        after = EntryBelief(state.information + key * (value / noise), state.precision + key.square() / noise)
        variance = noise + key.square() / state.precision
        error = value - key * state.mean
        evidence = -0.5 * (error.square() / variance + (2 * math.pi * variance).log()).sum((-2, -1))
        return Written(after, evidence)

    def read(self, state: EntryBelief, q: Tensor, step: Step) -> Reading:
        """Σ_i q_i M_ij and Σ_i q_i²/λ_ij."""
        del step
        weight = q[..., None] / state.precision
        return Reading((weight * state.information).sum(-2), (weight * q[..., None]).sum(-2))

    def gain_groups(self, M: int) -> int:
        """Every value column has its own variance."""
        return M

    def state_flaws(self, state: EntryBelief, *, thorough: bool) -> list[Flaw]:
        """Precisions that are not positive."""
        del thorough
        precision = state.precision
        return [
            Flaw(
                "precision",
                "numbers above 0",
                precision <= 0,
                lambda index: f"{precision[tuple(index)].item():.6g} at index {index}",
                NotPositiveDefiniteError,
            )
        ]

    def state_size(self, D: int, M: int) -> StateSize:
        """η and λ."""
        return StateSize(mean=D * M, covariance=D * M)

    def state_formula(self) -> str:
        """η and λ."""
        return "2·D·M"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Drift of both, write of both, and the division and the product of the read."""
        return "D·M", 7 * D * M


@final
@dataclass(frozen=True)
class KalmanLinearAttention(EntryDesign):
    r"""Kalman Linear Attention: every entry of memory drifts alone and sees every write alone.

    $$S_{ij} \mid \text{past} \sim \mathcal N(a_{ij} S_{ij},\ p_{ij}), \qquad
    \bar\lambda = \frac{\lambda}{a^2 + p \lambda}, \qquad \bar\eta = \frac{a\, \eta}{a^2 + p \lambda}$$

    In the paper's letters $\Lambda^v = 1/r^2$; a and p are constant in time there and are step parameters here. The
    precision recursion is a fractional linear (Möbius) map of each entry.

    Step parameters: `log_decay` log a, at most 0, and `process_noise` p ≥ 0, each [B,T,H] or [B,T,H,D,M]; `write_noise`
    r² > 0, [B,T,H] or [B,T,H,M].
    """

    title = "Kalman Linear Attention"
    citation = (
        "Shaj, Barker, Scannell, Szecsenyi, Crowley & Storkey, Kalman Linear Attention: Parallel Bayesian Filtering "
        "For Efficient Language Modelling and State Tracking, arXiv:2602.10743, 2026"
    )
    note = (
        "exact for its own model, in which every row explains the whole value alone: correlations between rows and the "
        "error that they share are thrown away; the published layer has one head and a, p constant in time"
    )
    step_parameters = (
        StepParameter("log_decay", "log a_t", axes=("D", "M"), optional_axes=True, bound="<= 0"),
        StepParameter("process_noise", "p_t", axes=("D", "M"), optional_axes=True, bound=">= 0"),
        _WRITE_NOISE,
    )

    def predict(self, state: EntryBelief, step: Step) -> EntryBelief:
        """λ̄ = λ/(a² + pλ), η̄ = aη/(a² + pλ)."""
        decay = step["log_decay"].exp()
        spread = decay.square() + step["process_noise"] * state.precision
        return EntryBelief(decay * state.information / spread, state.precision / spread)

    def sources(self) -> Mapping[str, Source]:
        """Decays from a spectrum, small process noise."""
        return {"log_decay": Spectrum("log_decay"), "process_noise": Learned(0.01), "write_noise": Learned(0.5)}

    def assumptions(self) -> Assumptions:
        """Entries that drift alone, rows that explain a value alone."""
        return Assumptions("EntryDecay", "RowsAlone", "Entries")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Drift, likelihood, filter and read of an entry."""
        drift = Equation(
            "S_ij ~ N(a_ij S_ij, p_ij)", r"S_{ij} \mid \text{past} \sim \mathcal{N}(a_{ij} S_{ij},\ p_{ij})"
        )
        predict = Equation(
            "λ̄ = λ / (a² + p λ),  η̄ = a η / (a² + p λ)",
            r"\bar\lambda = \frac{\lambda}{a^2 + p \lambda},\quad \bar\eta = \frac{a\, \eta}{a^2 + p \lambda}",
        )
        return (
            ("memory drifts", (drift,)),
            ("a write observes", (_DENSITY,)),
            ("predict", (predict,)),
            ("write", _WRITE),
            ("read", (_READ,)),
        )


@final
@dataclass(frozen=True)
class Palimpsa(EntryDesign):
    r"""Palimpsa: evidence about every entry fades, and its importance returns to that of the prior.

    $$\bar\lambda = \gamma_t \lambda + (1 - \gamma_t) \lambda_0, \qquad \bar\eta = \gamma_t \eta$$

    The precision λ is the paper's importance I, and $1/r_j^2$ its plasticity $b_j$. Its attention adds k v, not k v b:
    that is this write with the value v/b, which the layer passes. Forgetting by γ tempers the evidence of the past and
    leaves the prior, as in `MesaMemory`. With γ = 1 entries only become surer. With $\lambda \approx \lambda_0$
    throughout the mean is gated linear attention (Mamba-2).

    Step parameters: `log_decay` log γ [B,T,H], at most 0; `prior_precision` λ₀ > 0, [B,T,H]; `write_noise` r² > 0,
    [B,T,H] or [B,T,H,M].

    Args:
        precision: λ before anything is written; the published layer starts at λ₀ = 1.
    """

    precision: float = 1.0
    title = "Palimpsa"
    citation = (
        "Bonnet, Lohoff, Finkbeiner, Skhikerujah & Neftci, Learning to Remember, Learn, and Forget in Attention-Based "
        "Models, arXiv:2602.09075, 2026 (ICML 2026)"
    )
    note = (
        "exact for its own model, in which every row explains the whole value alone, with old evidence tempered by "
        "γ_t: correlations between rows and the error that they share are thrown away"
    )
    step_parameters = (
        StepParameter("log_decay", "log γ_t", bound="<= 0"),
        StepParameter("prior_precision", "λ_0", bound="> 0"),
        _WRITE_NOISE,
    )

    def __post_init__(self) -> None:
        number = isinstance(self.precision, (int, float)) and not isinstance(self.precision, bool)
        if not (number and math.isfinite(self.precision) and self.precision > 0):
            raise ValueError(f"Palimpsa(precision): expected a finite number above 0, got {self.precision!r}")

    def prior_precision(self) -> float:
        """Of the field."""
        return float(self.precision)

    def predict(self, state: EntryBelief, step: Step) -> EntryBelief:
        """λ̄ = γλ + (1 − γ)λ₀, η̄ = γη."""
        log_decay = step["log_decay"][..., None, None]
        kept, lost = log_decay.exp(), -log_decay.expm1()
        resting = step["prior_precision"][..., None, None]
        return EntryBelief(kept * state.information, kept * state.precision + lost * resting)

    def passages(self) -> tuple[Passage, ...]:
        """Sums that fade by γ."""
        return (FadingSums(lambda parameters: parameters["log_decay"].exp()),)

    def sources(self) -> Mapping[str, Source]:
        """Decays from a spectrum, and a prior that keeps its precision."""
        return {
            "log_decay": Spectrum("log_decay"),
            "prior_precision": float(self.precision),
            "write_noise": Learned(0.5),
        }

    def assumptions(self) -> Assumptions:
        """Evidence that fades, rows that explain a value alone."""
        return Assumptions("FadingEvidence", "RowsAlone", "Entries")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Forgetting, likelihood, sums and read of an entry."""
        prior = Equation("S_ij ~ N(0, 1/λ_0)", r"S_{ij} \sim \mathcal{N}(0,\ 1/\lambda_0)")
        predict = Equation(
            "λ̄ = γ_t λ + (1 − γ_t) λ_0,  η̄ = γ_t η",
            r"\bar\lambda = \gamma_t \lambda + (1 - \gamma_t) \lambda_0,\quad \bar\eta = \gamma_t \eta",
        )
        return (
            ("assume", (prior,)),
            ("a write observes", (_DENSITY,)),
            ("predict", (predict,)),
            ("write", _WRITE),
            ("read", (_READ,)),
        )
