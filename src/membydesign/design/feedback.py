"""A drift that feeds memory back along the write key: Comba's closed loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Learned, Spectrum
from membydesign.design.transition import Removal, RowDrift, Transition
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design.protocol import Step


@final
@dataclass(frozen=True)
class KeyFeedback(Transition):
    r"""Memory fades, and loses part of what it holds at the key of the coming write: $A_t = a_t I - b_t k_t k_t^\top$.

    A scalar plus a rank of one, as in Comba. What is taken off is read before the decay, so with $b_t = a_t\beta_t$ and
    the write $\beta_t k_t v_t^\top$ it is the delta rule of Gated DeltaNet, and with $b_t = 0$ it is `ScalarDecay`.
    With unit keys no direction grows as long as $b_t \le 1 + a_t$.

    Step parameters: `log_decay` log a [B,T,H], at most 0; `feedback` b [B,T,H] in [0, 1].
    """

    step_parameters = (
        StepParameter("log_decay", "log a_t", bound="<= 0"),
        StepParameter("feedback", "b_t", bound="[0, 1]", idle=0.0),
    )
    parameter_sources = {
        **Transition.parameter_sources,
        "log_decay": Spectrum("log_decay"),
        "feedback": Learned(0.5),
    }
    multiplications_per_entry = 3

    @property
    def matrix(self) -> Equation:
        """A_t = a_t I − b_t k_t k_tᵀ."""
        return Equation(
            "A_t = a_t I − b_t k_t k_tᵀ", r"\mathbf{A}_t = a_t \mathbf{I} - b_t \mathbf{k}_t \mathbf{k}_t^\top"
        )

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """A x − b k (kᵀx), with parameters [...] and the key of the step, [..., D]; x [..., D, n]."""
        k = cast("Step", step).k
        fed_back = (step["feedback"][..., None] * k)[..., None] * product(k[..., None, :], x)
        return step["log_decay"].exp()[..., None, None] * x - fed_back

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """One decay for all rows, and a removal along the key."""
        removal = Removal(k, parameters["feedback"][..., None] * k)
        return RowDrift(parameters["log_decay"][..., None], removal=removal)
