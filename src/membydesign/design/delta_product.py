r"""DeltaProduct: several delta-rule writes for each token, so that one token can reflect memory more than once.

M ← a_t M_{t-1}
M ← M + β_tj k_tj (v_tj − Mᵀ k_tj)ᵀ,   j = 1, …, n                A_t = a_t Π_j (I − β_tj k_tj k_tjᵀ)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from membydesign.design.linear_recurrence import READ, ChosenGain, Writes
from membydesign.design.protocol import Assumptions
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Spectrum
from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True)
class DeltaProduct(ChosenGain):
    r"""n delta-rule writes for each token, of which `k` and `v` are the last.

    $$M \leftarrow a_t M_{t-1}, \qquad M \leftarrow M + \beta_{t,j} k_{t,j} (v_{t,j} - M^\top k_{t,j})^\top
    \quad (j = 1, \ldots, n)$$

    The state transition is $a_t \prod_j (I - \beta_{t,j} k_{t,j} k_{t,j}^\top)$. With unit keys and $\beta = 2$ each
    factor is a reflection, and two of them are a rotation: with $\beta$ up to 2 the memory tracks states that a delta
    rule with $\beta \le 1$ cannot. Such a write overshoots its value. That is no filter's: a positive write noise gives
    $\beta\lVert k\rVert^2 < 1$.

    Args:
        writes_per_token: n.
        largest_step: the β of a gate of one: 2 lets eigenvalues be negative, 1 makes it the plain delta rule for n = 1.

    Step parameters: `log_decay` log a [B,T,H], at most 0; `gate` [B,T,H,n] in [0, 1], with β = largest_step · gate;
    `earlier_keys` [B,T,H,n−1,D] and `earlier_values` [B,T,H,n−1,M], the writes before `k` and `v`, in their order; none
    for n = 1. Keys should have length one.
    """

    writes_per_token: int = 2
    largest_step: float = 2.0
    title = "DeltaProduct (gated)"
    citation = (
        "Siems, Carstensen, Zela, Hutter, Pontil & Grazzi, DeltaProduct: Improving State-Tracking in Linear RNNs via "
        "Householder Products, NeurIPS 2025"
    )
    note = (
        "n delta-rule writes for each token, with step sizes up to 2; n = 1 with largest_step=1 is Gated DeltaNet; "
        "DeltaProduct(writes_per_token=n) for other n"
    )

    def __post_init__(self) -> None:
        check_whole_number("DeltaProduct(writes_per_token)", self.writes_per_token, 1)
        step = self.largest_step
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 < step <= 2:
            raise ValueError(f"DeltaProduct(largest_step): expected a number above 0 and at most 2, got {step!r}")

    @property
    def step_parameters(self) -> tuple[StepParameter, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Decay, gates, and the writes before the last one."""
        n = self.writes_per_token
        own = (
            StepParameter("log_decay", "log a_t", bound="<= 0"),
            StepParameter("gate", "β_t", axes=(n,), bound="[0, 1]", idle=0.0),
        )
        if n == 1:
            return own
        return (
            *own,
            StepParameter("earlier_keys", "k_tj", axes=(n - 1, "D")),
            StepParameter("earlier_values", "v_tj", axes=(n - 1, "M")),
        )

    def log_decay(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Of all rows together, once for each token."""
        return parameters["log_decay"][..., None]

    def writes(self, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], kept: Any) -> Writes:
        """The earlier writes, then k and v."""
        import torch

        del kept
        keys, values = k[..., None, :], v[..., None, :]
        if self.writes_per_token > 1:
            keys = torch.cat((parameters["earlier_keys"], keys), -2)
            values = torch.cat((parameters["earlier_values"], values), -2)
        return Writes(keys, self.largest_step * parameters["gate"][..., None] * keys, values)

    def sources(self) -> dict[str, Spectrum]:
        """Decays from a spectrum: heads start with memories of 10 to 1,000 tokens."""
        return {"log_decay": Spectrum("log_decay")}

    def layer_parameters(self, parameters: Mapping[str, Tensor | float]) -> Mapping[str, Tensor | float]:
        """Bring the earlier keys to length one, as a layer does with k."""
        keys = parameters.get("earlier_keys")
        if keys is None or isinstance(keys, (int, float)):
            return parameters
        from torch.nn.functional import normalize

        return {**parameters, "earlier_keys": normalize(keys, dim=-1)}

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Decay and read, and a prediction and a write for each of the n writes."""
        n = self.writes_per_token
        return "n·D·M", (2 + 2 * n) * D * M

    def assumptions(self) -> Assumptions:
        """Several gradient steps in the place of a covariance."""
        return Assumptions("ScalarDecay", "SeveralWrites", "MeanOnly")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Decay, n corrections, read."""
        n = self.writes_per_token
        return (
            ("predict", (Equation("M ← a_t M_{t-1}", r"\mathbf{M} \leftarrow a_t \mathbf{M}_{t-1}"),)),
            (
                "write",
                (
                    Equation(
                        f"M ← M + β_tj k_tj (v_tj − Mᵀ k_tj)ᵀ,  j = 1, …, {n}",
                        r"\mathbf{M} \leftarrow \mathbf{M} + \beta_{t,j} \mathbf{k}_{t,j} "
                        r"(\mathbf{v}_{t,j} - \mathbf{M}^\top \mathbf{k}_{t,j})^\top"
                        rf",\quad j = 1, \ldots, {n}",
                    ),
                ),
            ),
            ("read", (READ,)),
        )
