r"""Process noise that returns memory to its prior: $Q_t = \sigma_t^2 (I - A_t A_t^\top)$, for any transition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.design.row_drift import RowNoise
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.transition import Transition
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design.row_drift import RowDrift
    from membydesign.design.sources import Source

STATIONARY_VARIANCE = StepParameter("stationary_variance", "σ_t²", bound=">= 0")


@final
@dataclass(frozen=True)
class Stationary(Transition):
    r"""Any transition, with noise that replaces what it takes: memory relaxes to its prior instead of diffusing.

    $$S_t \mid S_{t-1} \sim \mathcal N\bigl(A_t S_{t-1},\ \sigma_t^2 (I - A_t A_t^\top)\bigr)$$

    With one σ² for all tokens, $\mathcal N(0, \sigma^2 I)$ is the stationary law of memory: a covariance that starts
    at $P_0 = \sigma^2 I$ stays there until something is written, and $P_t \preceq \sigma^2 I$ always. Gains then do not
    depend on how many tokens came before, so that a layer may run far beyond its training length. Free process noise
    has no such bound: rows that fade slowly reach $\ell^2/(1 - \alpha^2)$.

    A layer takes σ² from the covariance's prior variance ($P_0 = \sigma^2 I$). Only the ratio of σ² to the write noise
    r² enters gains, so that next to a learned r² a fixed σ² loses nothing.

    The noise enters every row, also of `DampedRotation(noise="real")`, of which only the placement of keys remains: no
    row can inflate. A transition with $\lVert A_t\rVert > 1$ has no stationary law, since $Q_t$ would not be a
    covariance; such a token raises a `NotPositiveDefiniteError`.

    Step parameters: those of `drift`; `stationary_variance` $\sigma_t^2$ ≥ 0, [B,T,H].

    Args:
        drift: how memory moves, $A_t$: any `Transition`. Its own process noise is not used.

    Examples:
        >>> from membydesign import Dense, DesignModel, DiagonalDecay, ObserveMemory
        >>> design = DesignModel(Stationary(DiagonalDecay()), ObserveMemory(), Dense())
        >>> [parameter.name for parameter in design.step_parameters]
        ['log_decay', 'stationary_variance', 'write_noise']
    """

    drift: Transition

    noise_parameters = (STATIONARY_VARIANCE,)

    def __post_init__(self) -> None:
        if not isinstance(self.drift, Transition) or isinstance(self.drift, Stationary):
            raise ValueError(f"Stationary(drift): expected another Transition, got {self.drift!r}")

    def __repr__(self) -> str:
        return f"Stationary({self.drift!r})"

    @property
    def step_parameters(self) -> tuple[StepParameter, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the drift."""
        return self.drift.step_parameters

    @property
    def parameter_sources(self) -> Mapping[str, Source]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the drift; σ² = 1 unless the covariance names its prior."""
        return {**self.drift.parameter_sources, STATIONARY_VARIANCE.name: 1.0}

    @property
    def multiplications_per_entry(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the drift."""
        return self.drift.multiplications_per_entry

    @property
    def matrix(self) -> Equation:
        """That of the drift."""
        return self.drift.matrix

    @property
    def noise_law(self) -> Equation:
        """σ²(I − A Aᵀ)."""
        return Equation("σ_t² (I − A_t A_tᵀ)", r"\sigma_t^2 (\mathbf{I} - \mathbf{A}_t \mathbf{A}_t^\top)")

    @property
    def process_noise_shape(self) -> None:
        """None: it reaches every row, by as much as fades."""

    @property
    def label(self) -> str:
        """The drift's, and what became of its noise."""
        return f"stationary {self.drift.label}"

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """A_t x, as the drift has it."""
        return self.drift.apply(x, step)

    def noise_covariance(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """σ²(I − A Aᵀ), [B,H,D,D]: row by row for drifts of rows, otherwise from A as a matrix."""
        D = x.shape[-2]
        drift = {parameter.name: step[parameter.name] for parameter in self.step_parameters}
        variance = step[STATIONARY_VARIANCE.name]
        tokens = {name: value.unsqueeze(1) for name, value in drift.items()}
        rows = self.row_drift(tokens, x.new_zeros(*x.shape[:-2], D).unsqueeze(1))
        if rows is not None and rows.removal is None:
            entering = RowNoise(variance.unsqueeze(1), x.new_ones(1), stationary=True).entering(rows)
            return torch.diag_embed(entering[:, 0].expand(*x.shape[:-2], D))
        identity = torch.eye(D, dtype=x.dtype, device=x.device).expand(*x.shape[:-2], D, D)
        A = self.drift.apply(identity, drift)
        squared = product(A, A.mT)
        taken = identity - (squared + squared.mT) / 2
        self._refuse_growth(taken)
        return variance[..., None, None] * taken

    def _refuse_growth(self, taken: Tensor) -> None:
        """Raise an error where A takes nothing from a direction but adds to it: Q would not be a covariance."""
        if not _is_readable(taken):
            return
        D, taken = taken.shape[-1], taken.detach()
        rounding = 8 * max(D, 8) * torch.finfo(taken.dtype).eps * (1 + (1 - taken).abs().amax())
        info = torch.linalg.cholesky_ex(taken + rounding * torch.eye(D, dtype=taken.dtype, device=taken.device)).info
        if not info.any():
            return
        b, h = info.nonzero()[0].tolist()
        least = torch.linalg.eigvalsh(taken[b, h]).min().item()
        raise NotPositiveDefiniteError(
            f"{self!r}: expected ‖A_t‖ ≤ 1, so that Q_t = σ²(I − A_t A_tᵀ) is a covariance, got the eigenvalue "
            f"{least:.3g} of I − A_t A_tᵀ at batch {b}, head {h}"
        )

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift | None:
        """As the drift has it."""
        return self.drift.row_drift(parameters, k)

    def row_noise(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowNoise | None:
        """σ²(1 − a²) of each row, for drifts of rows that remove nothing."""
        rows = self.row_drift(parameters, k)
        if rows is None or rows.removal is not None:
            return None
        return RowNoise(parameters[STATIONARY_VARIANCE.name], k.new_ones(1), stationary=True)

    def refuse_key_size(self, D: int) -> str | None:
        """As the drift has it."""
        return self.drift.refuse_key_size(D)

    def refuse_without_noise(self) -> str | None:
        """Without process noise there is nothing to replace what fades."""
        return f"{self!r} says what process noise enters, but this design has no process noise; use {self.drift!r}"

    def with_drift(self, drift: Transition) -> Stationary:
        """Stationary(drift)."""
        return Stationary(drift)

    def layer_key_size(self, D: int) -> int:
        """As the drift has it."""
        return self.drift.layer_key_size(D)

    def layer_keys(self, x: Tensor) -> Tensor:
        """As the drift has it."""
        return self.drift.layer_keys(x)


def _is_readable(x: Tensor) -> bool:
    """Whether the values of x can be read: not while torch traces or maps them."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(x) is torch.Tensor and not x.is_meta and not torch._C._len_torch_dispatch_stack()
