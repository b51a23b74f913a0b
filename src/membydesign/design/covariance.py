r"""What the belief remembers of its own uncertainty, from one write to the next.

The mean update reads the predicted covariance $\bar P_t$ through the warped key $u_t = \bar P_t k_t$. Keeping
$\bar P_t$ whole makes the filter exact (`Dense`); `diagonal.py` and `reset.py` have classes that throw something away.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design.passage import CovarianceMap, Passage
from membydesign.design.protocol import Flaw, Step
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sequence_drift import Drift, Gains, SequenceDrift
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design.sources import Source
    from membydesign.design.write import Write, WriteEvent
    from membydesign.state import Sizes

PREDICTED = Equation(
    "P̄_t = A_t P_{t-1} A_tᵀ + ℓ_t² N",
    r"\bar{\mathbf{P}}_t = \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top + \ell_t^2 \mathbf{N}",
)


class Covariance(ABC):
    r"""What is kept of the covariance between two tokens.

    `kept` is a tensor [B,H,...], None, or a named tuple of them; `predicted` is whatever `predict` returns.

    Attributes:
        exactness: how the resulting filter relates to the exact one.
        belief: the class of the state (mean, kept).
        step_parameters: parameters of its own, such as the variance that a reset returns to.
        parameter_sources: where a layer takes step parameters from, also those of the other parts if they go together.
        predicts: whether it propagates $A_t P A_t^\top + Q_t$, so that process noise enters.
        has_gain: whether `times` is defined, which a write that observes memory needs.
        has_variance: whether `variance` is defined.
    """

    exactness: ClassVar[str]
    belief: ClassVar[type[Belief]] = Belief
    step_parameters: ClassVar[tuple[StepParameter, ...]] = ()
    parameter_sources: ClassVar[Mapping[str, Source]] = {}
    predicts: ClassVar[bool] = True
    has_gain: ClassVar[bool] = True
    has_variance: ClassVar[bool] = True

    @abstractmethod
    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Any:
        """What is kept before anything is written."""

    @abstractmethod
    def predict(self, kept: Any, drifted: Drift, step: Step) -> Any:
        r"""The predicted covariance $\bar P_t$, in any form.

        Args:
            kept: what was kept after the last token.
            drifted: maps matrices P, [B,H,G,D,D], to A_t P A_tᵀ + Q_t; `drifted.apply` maps x, [B,H,G,D,n], to A_t x.
            step: the parameters of the token.
        """

    @abstractmethod
    def times(self, predicted: Any, k: Tensor) -> Tensor:
        """The warped key P̄ k of k, [B,H,D]: [B,H,G,D], or [B,H,1,D] if it is the same for all groups."""

    def along(self, predicted: Any, k: Tensor, warped_key: Tensor) -> Tensor:
        """The variance kᵀ P̄ k along a key, [B,H,G]; `warped_key` is what `times` returned."""
        del predicted
        return (k[:, :, None] * warped_key).sum(-1)

    @abstractmethod
    def condition(self, predicted: Any, event: WriteEvent, k: Tensor) -> Any:
        """What is kept after a write at key k, [B,H,D]."""

    @abstractmethod
    def variance(self, kept: Any, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """The variance qᵀ P q of a read at q, [B,H,D], after the token's write: [B,H,G].

        Args:
            kept: what is kept after the write.
            q: the query.
            noise: r² of the write, [B,H,G]; None if it is not known from parameters alone.
            step: the parameters of the token.
        """

    @abstractmethod
    def elements(self, D: int, groups: int) -> int:
        """Numbers kept per head, for keys of size D and `groups` noise groups."""

    @property
    @abstractmethod
    def equations(self) -> tuple[Equation, ...]:
        """How the predicted covariance is formed, and what is kept of the posterior one."""

    def gains(self, kept: Any, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains | None:
        """The gains of a whole sequence, which give a design the chunked mean pass; None (the default) if unavailable.

        A covariance never sees values, so its pass over the tokens can come first. `gains = Covariance.gains_by_token`
        runs that pass token by token with the methods above.

        Args:
            kept: what is kept before the first token.
            k: keys, [B,T,H,D].
            drift: how memory drifts, and the noise of writes.
            q: queries, [B,T,H,D], whose variances to return too; or None.
        """
        del kept, k, drift, q
        return None

    def gains_by_token(self, kept: Any, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        """The gains of a sequence from `predict`, `times` and `condition`, token by token; arguments as for `gains`."""
        from membydesign.design.write import WriteEvent

        every: list[tuple[Tensor, ...]] = []
        for t in range(k.shape[1]):
            step = Step({name: x[:, t] for name, x in drift.parameters.items()}, k[:, t])
            noise = drift.write_noise[:, t]
            predicted = self.predict(kept, drift.steps(t), step)
            warped_key = self.times(predicted, step.k)
            precision = 1 / (noise + self.along(predicted, step.k, warped_key))
            nothing = noise.new_zeros(())
            event = WriteEvent(warped_key.expand(*precision.shape, -1), precision, nothing, nothing, noise=noise)
            kept = self.condition(predicted, event, step.k)
            variance = () if q is None else (self.variance(kept, q[:, t], noise, step),)
            every.append((event.warped_key, precision, *variance))
        direction, precision, *variance = (torch.stack(parts, 1) for parts in zip(*every, strict=True))
        return Gains(direction, precision, precision, kept, *variance)

    def implied_noise(self, kept: Any, drifted: Drift, step: Step) -> Tensor | None:
        """The process noise P̄_t − A_t P A_tᵀ, [B,H,G,D,D], of a structure that has its own; None: the transition's Q_t.

        `testing.oracles` conditions the joint Gaussian with it. Arguments as for `predict`.
        """
        del kept, drifted, step
        return None

    def passage(self, write: Write) -> Passage | str | None:
        """How what is kept passes a stretch of tokens; None if nothing is kept; or why it cannot (the default).

        The reason follows "for Title, ".
        """
        del write
        name = type(self).__name__
        if self.exactness != "exact filter":
            return f"since {name} truncates the covariance at every write, and no map of a stretch is known for that"
        return f"since {name} does not say how what it keeps passes a stretch of tokens"

    def gain_groups(self, groups: int, M: int) -> int:
        """How many gains a write has, for `groups` noise groups and values of size M."""
        del M
        return groups

    def refuse_write(self, write: Write) -> str | None:
        """Why a design with this covariance and that write has no meaning; None if it has."""
        del write
        return None

    def refuse_key_size(self, D: int) -> str | None:
        """What D must be, if this structure cannot cover D rows ("D divisible by 4, since …"); None if it can."""
        del D
        return None

    def flaws(self, kept: Any, *, thorough: bool) -> list[Flaw]:
        """What may be wrong with what is kept, for errors on beliefs that a user passes in."""
        del kept, thorough
        return []

    def with_prior(self, prior: float) -> Covariance | None:
        """The same structure with another prior variance; None if it has none."""
        del prior
        return None

    def formula(self, groups: int) -> str:
        """`elements` in the letters of the legend, such as "D²"; "" for nothing."""
        del groups
        return ""

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """The order of work per token besides D·M, and its multiplications; `drift` of them for each entry of A x."""
        del groups, drift
        return "", 2 * D


def check_prior(name: str, prior: float) -> None:
    """Refuse a prior that is not a variance."""
    if isinstance(prior, bool) or not isinstance(prior, (int, float)) or not math.isfinite(prior) or prior < 0:
        raise ValueError(f"{name}(prior): expected a finite variance of at least 0, got {prior!r}")


def matrix_flaws(kept: Tensor, *, thorough: bool) -> list[Flaw]:
    """Asymmetric or indefinite matrices, [B,H,G,...,n,n], beyond what rounding explains."""
    D, eps = kept.shape[-1], torch.finfo(kept.dtype).eps
    diagonal = kept.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.abs().amax(-1).clamp_min(torch.finfo(kept.dtype).tiny)[..., None, None]
    rounding = 8 * max(D, 8) * eps
    if not thorough:
        expected, worst = "variances of at least 0", diagonal.amin(-1)
        lost = worst < -rounding * scale[..., 0, 0]
        return [Flaw("covariance", expected, lost, lambda _: f"{worst.min().item():.3g}", NotPositiveDefiniteError)]
    asymmetry = ((kept - kept.mT).abs() / scale).max()
    raised = kept / scale + rounding * torch.eye(D, dtype=kept.dtype, device=kept.device)

    def negative(index: list[int]) -> str:
        *sample, b, h, g = index
        mapped = f", sample {', '.join(map(str, sample))} of torch.vmap" if sample else ""
        return f"a negative eigenvalue at batch {b}, head {h}, group {g}, before position 0{mapped}"

    return [
        Flaw(
            "covariance",
            "symmetric matrices",
            asymmetry > rounding,
            lambda _: f"a relative asymmetry of {asymmetry.item():.3g}",
        ),
        Flaw(
            "covariance",
            "positive semi-definite matrices",
            torch.linalg.cholesky_ex(raised).info != 0,
            negative,
            NotPositiveDefiniteError,
        ),
    ]


def check_whole_number(name: str, argument: str, value: int) -> None:
    """Refuse what is not a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}({argument}): expected a whole number of at least 1, got {value!r}")


def times_groups(groups: int, formula: str) -> str:
    """A formula for one group, for all of them."""
    return formula if groups == 1 else f"{groups}·{formula}"


def updated(predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
    r"""$P = \bar P - \beta u u^\top$ with matrices [B,H,G,D,D], or $\bar P + \rho k k^\top$ after an additive write."""
    if event.left is not None:
        return predicted + event.left[..., None, None] * (k[..., None, :, None] * k[..., None, None, :])
    u = event.warped_key
    return predicted - event.precision[..., None, None] * (u[..., :, None] * u[..., None, :])


@dataclass(frozen=True)
class WholeMatrix(Covariance):
    r"""A D×D covariance for each noise group: $P_t = \bar P_t - \beta_t u_t u_t^\top$ after a write, $P_0 = p_0 I$.

    `Dense` drifts by $A_t P A_t^\top + Q_t$; derive from this class for another drift of the covariance.
    """

    prior: float = 1.0
    exactness = "exact filter"

    def __post_init__(self) -> None:
        check_prior(type(self).__name__, self.prior)

    @property
    @abstractmethod
    def predicted(self) -> Equation:
        """How P̄ is formed."""

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄, and P = P̄ − βuuᵀ."""
        return (
            self.predicted,
            Equation(
                "P_t = P̄_t − β_t u_t u_tᵀ",
                r"\mathbf{P}_t = \bar{\mathbf{P}}_t - \beta_t \mathbf{u}_t \mathbf{u}_t^\top",
            ),
        )

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
        """p₀ I for every group."""
        identity = torch.eye(sizes.D, dtype=dtype, device=device)
        return (self.prior * identity).expand(sizes.batch, sizes.heads, groups, sizes.D, sizes.D).clone()

    def times(self, predicted: Tensor, k: Tensor) -> Tensor:
        """P̄ k."""
        return product(predicted, k[:, :, None, :, None])[..., 0]

    def condition(self, predicted: Tensor, event: WriteEvent, k: Tensor) -> Tensor:
        """P̄ − βuuᵀ."""
        return updated(predicted, event, k)

    def variance(self, kept: Tensor, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """qᵀ P q, or zero where rounding makes it negative."""
        del noise, step
        q = q[:, :, None, None]
        return (product(q, kept) * q).sum((-2, -1)).clamp_min(0)

    def flaws(self, kept: Tensor, *, thorough: bool) -> list[Flaw]:
        """Asymmetric or indefinite matrices, beyond what rounding explains."""
        return matrix_flaws(kept, thorough=thorough)

    def with_prior(self, prior: float) -> WholeMatrix:
        """The same class with another prior."""
        return replace(self, prior=prior)

    def elements(self, D: int, groups: int) -> int:
        """G·D²."""
        return groups * D * D

    def formula(self, groups: int) -> str:
        """D² for each group."""
        return times_groups(groups, "D²")

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """The drift from both sides, the warped key and the downdate."""
        return "G·D²", groups * D * D * (2 * drift + 2)


@final
@dataclass(frozen=True)
class Dense(WholeMatrix):
    r"""The whole D×D covariance is propagated: the exact filter.

    $$\bar P_t = A_t P_{t-1} A_t^\top + \ell_t^2 N, \qquad P_t = \bar P_t - \beta_t u_t u_t^\top, \qquad P_0 = p_0 I$$

    Under `LatentInput` the mean never reads the covariance; Dense then keeps the exact
    $P_t = A_t P_{t-1} A_t^\top + \omega_t r_t^2\, k_t k_t^\top$, for those who want the variance of a read.

    Args:
        prior: $p_0$, the variance of every direction before anything is written.

    Step parameters: `process_noise` $\ell_t^2$ ≥ 0, [B,T,H] (none under `LatentInput`).
    State: G·D² elements, [B,H,G,D,D].
    """

    @property
    def parameter_sources(self) -> Mapping[str, Source]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Stationary noise returns memory to where it starts: σ² = p₀."""
        return {"stationary_variance": float(self.prior)}

    @property
    def predicted(self) -> Equation:
        """P̄ = A P Aᵀ + ℓ²N."""
        return PREDICTED

    def predict(self, kept: Tensor, drifted: Drift, step: Step) -> Tensor:
        """A P Aᵀ + Q."""
        del step
        return drifted(kept)

    def passage(self, write: Write) -> CovarianceMap:
        """A fractional linear map; a linear one under additive writes."""
        return CovarianceMap(observed=write.observes_memory)
