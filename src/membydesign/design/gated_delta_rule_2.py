r"""Gated DeltaNet-2: a delta rule with gates of its own for erasing and for writing, each channel by channel.

M̄_t = diag(α_t) M_{t-1}
M_t = M̄_t + k_t (w_t ⊙ v_t − M̄_tᵀ (b_t ⊙ k_t))ᵀ           b: erase gate over rows,  w: write gate over columns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from membydesign.design.linear_recurrence import READ, ChosenGain, Writes
from membydesign.design.protocol import Assumptions
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True)
class GatedDeltaRule2(ChosenGain):
    r"""The recurrence of Gated DeltaNet-2: what is erased and what is written have gates of their own.

    $$\bar M_t = \mathrm{diag}(\alpha_t) M_{t-1}, \qquad
    M_t = \bar M_t + k_t \bigl(w_t \odot v_t - \bar M_t^\top (b_t \odot k_t)\bigr)^\top$$

    With $b_t = w_t = \beta_t$ it is KDA, which is the filter of a covariance that is reset at every step. Otherwise
    memory is compared at the key $b_t \odot k_t$ and corrected along $k_t$, which no isotropic covariance does.

    Step parameters: `log_decay` log α [B,T,H,D], at most 0; `erase_gate` b [B,T,H,D] and `write_gate` w [B,T,H,M], in
    [0, 1]. Keys should have length one.
    """

    title = "Gated DeltaNet-2"
    citation = (
        "Hatamizadeh, Choi & Kautz, Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, "
        "arXiv:2605.22791, 2026"
    )
    note = (
        "KDA with b_t = w_t = β_t; the erase gate makes the gain k_t differ from P̄_t e_t of any λI, so no belief about "
        "the error is kept"
    )
    step_parameters = (
        StepParameter("log_decay", "log α_t", axes=("D",), bound="<= 0"),
        StepParameter("erase_gate", "b_t", axes=("D",), bound="[0, 1]", idle=0.0),
        StepParameter("write_gate", "w_t", axes=("M",), bound="[0, 1]", idle=0.0),
    )

    def log_decay(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Of each row."""
        return parameters["log_decay"]

    def writes(self, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], kept: Any) -> Writes:
        """One write, of w ⊙ v against what memory holds at b ⊙ k."""
        del kept
        key, value = parameters["erase_gate"] * k, parameters["write_gate"] * v
        return Writes(key[..., None, :], k[..., None, :], value[..., None, :])

    def sources(self) -> dict[str, Spectrum]:
        """Decays from a spectrum: heads start with memories of 10 to 1,000 tokens."""
        return {"log_decay": Spectrum("log_decay")}

    def assumptions(self) -> Assumptions:
        """Gates over rows and columns in the place of a covariance."""
        return Assumptions("DiagonalDecay", "GatedEraseAndWrite", "MeanOnly")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Decay, gated correction, read."""
        return (
            (
                "predict",
                (
                    Equation(
                        "M̄_t = diag(α_t) M_{t-1}",
                        r"\bar{\mathbf{M}}_t = \mathrm{diag}(\boldsymbol{\alpha}_t) \mathbf{M}_{t-1}",
                    ),
                ),
            ),
            (
                "write",
                (
                    Equation(
                        "M_t = M̄_t + k_t (w_t ⊙ v_t − M̄_tᵀ (b_t ⊙ k_t))ᵀ",
                        r"\mathbf{M}_t = \bar{\mathbf{M}}_t + \mathbf{k}_t (\mathbf{w}_t \odot \mathbf{v}_t - "
                        r"\bar{\mathbf{M}}_t^\top (\mathbf{b}_t \odot \mathbf{k}_t))^\top",
                    ),
                ),
            ),
            ("read", (READ,)),
        )
