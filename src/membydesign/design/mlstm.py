r"""mLSTM: linear attention with exponential gates, a normaliser, and a running maximum that keeps both in range.

m_t = max(log f_t + m_{t-1}, ĩ_t)                                 the largest log weight so far
C_t = f'_t C_{t-1} + i'_t k_t v_tᵀ,   n_t = f'_t n_{t-1} + i'_t k_t
y_t = C_tᵀ q_t / (max(|n_tᵀ q_t|, exp(−m_t)) + ε)

f'_t = exp(log f_t + m_{t-1} − m_t),   i'_t = exp(ĩ_t − m_t)       both at most 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.belief import gaussian_log_density
from membydesign.design.linear_recurrence import Accumulate, LinearRecurrence, Recurrence
from membydesign.design.protocol import Assumptions, Reading, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Learned, Source, Spectrum
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from membydesign.design.protocol import Step
    from membydesign.state import Sizes

SCALES_AT_ONCE = 64
"""Tokens whose running maxima are computed from one cumulative sum, which must stay short to stay exact."""


class Normalised(NamedTuple):
    """What an mLSTM keeps: sums of weighted values and keys, in units of exp(log_scale).

    Attributes:
        values: C, [B,H,D,M].
        keys: n, [B,H,D].
        log_scale: m, [B,H].
    """

    values: Tensor
    keys: Tensor
    log_scale: Tensor


@dataclass(frozen=True)
class MLSTMMemory(LinearRecurrence):
    r"""The recurrence of mLSTM (xLSTM): exponential input gates, a normaliser n, a stabiliser m.

    $$C_t = f_t C_{t-1} + e^{\tilde\imath_t} k_t v_t^\top, \qquad n_t = f_t n_{t-1} + e^{\tilde\imath_t} k_t, \qquad
    y_t = \frac{C_t^\top q_t}{\max(|n_t^\top q_t|, 1)}$$

    C and n are kept in units of $e^{m_t}$, $m_t = \max(\log f_t + m_{t-1}, \tilde\imath_t)$, so that no gate overflows;
    the 1 becomes $e^{-m_t}$ there. With non-negative products $k^\top q$ the read is a weighted mean of values, as in
    softmax attention with a fixed-size state. A write adds without a look at what memory holds; no belief about
    reads is kept. The input gate says how much a token counts, as a precision does, but it is the network's choice.

    Args:
        eps: ε ≥ 0, added to the normaliser, in units of $e^{m_t}$ as released implementations have it; 0 for the
            paper's formula, where a query that meets nothing after a very large gate divides 0 by 0.

    Step parameters: `log_decay` log f [B,T,H], at most 0; `log_input` ĩ [B,T,H]. q is not scaled: pass q/√D for the
    published layer.
    """

    eps: float = 1e-6
    title = "mLSTM (xLSTM)"
    citation = (
        "Beck, Pöppel, Spanring, Auer, Prudnikova, Kopp, Klambauer, Brandstetter & Hochreiter, xLSTM: Extended Long "
        "Short-Term Memory, NeurIPS 2024"
    )
    note = (
        "linear attention with an input gate without bound, and a normaliser that is the query's own: reads are "
        "ratios, so they are not linear in the memory; the density of a write is that of linear attention, N(0, I)"
    )
    exactness = "normalised sums"
    step_parameters = (
        StepParameter("log_decay", "log f_t", bound="<= 0"),
        StepParameter("log_input", "ĩ_t", idle=-1e30),
    )

    def __post_init__(self) -> None:
        eps = self.eps
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"MLSTMMemory(eps): expected a finite number of at least 0, got {eps!r}")

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Normalised:
        """Zeros, in units of 1."""
        import torch

        parts = (sizes, sizes[:3], sizes[:2])
        return Normalised(*(torch.zeros(shape, dtype=dtype, device=device) for shape in parts))

    def predict(self, state: Normalised, step: Step) -> Normalised:
        """The unit takes in the decay: C and n stay as they are."""
        return state._replace(log_scale=state.log_scale + step["log_decay"])

    def condition(self, state: Normalised, k: Tensor, v: Tensor, step: Step) -> Written:
        """Take the larger of the old unit and the input gate as the new one, and add the write."""
        import torch

        m = torch.maximum(state.log_scale, step["log_input"])
        fading, weight = (state.log_scale - m).exp(), (step["log_input"] - m).exp()
        write = weight[..., None] * k
        values = fading[..., None, None] * state.values + write[..., None] * v[..., None, :]
        after = Normalised(values, fading[..., None] * state.keys + write, m)
        return Written(after, _density_of_inputs(v))

    def read(self, state: Normalised, q: Tensor, step: Step) -> Reading:
        """Cᵀq / max(|nᵀq|, exp(−m))."""
        del step
        values, keys = product(q[..., None, :], state.values)[..., 0, :], (q * state.keys).sum(-1)
        return Reading(self._ratio(values, keys, state.log_scale))

    def _ratio(self, values: Tensor, keys: Tensor, log_scale: Tensor) -> Tensor:
        import torch

        return values / (torch.maximum(keys.abs(), (-log_scale).exp()) + self.eps)[..., None]

    def matrix(self, state: Normalised) -> Tensor:
        """C and n side by side, [B,H,D,M+1]."""
        import torch

        return torch.cat((state.values, state.keys[..., None]), -1)

    def state_of(self, matrix: Tensor, kept: Tensor) -> Normalised:
        """C, n and m."""
        return Normalised(matrix[..., :-1].contiguous(), matrix[..., -1].contiguous(), kept)

    def recurrence(
        self, state: Normalised, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], accumulate: Accumulate
    ) -> Recurrence:
        """All units first; C and n then fade and grow by factors of at most one."""
        import torch

        del accumulate
        decay, gate = parameters["log_decay"], parameters["log_input"]
        m = running_maxima(state.log_scale, decay, gate)
        before = torch.cat((state.log_scale[:, None], m[:, :-1]), 1)
        fading = (decay + before - m).clamp(max=0)  # above 0 by rounding alone
        write = (gate - m).exp()[..., None] * k
        value = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        last = m[:, -1].clone()
        return Recurrence(fading[..., None], write[..., None, :], value[..., None, :], None, kept=last, aside=m)

    def outputs(self, y: Tensor, recurrence: Recurrence) -> Tensor:
        """The ratio of both sums."""
        return self._ratio(y[..., :-1], y[..., -1], recurrence.aside)

    def log_densities(self, v: Tensor, error: Tensor | None, recurrence: Recurrence) -> Tensor:
        """As of any write that observes only what it adds."""
        del error, recurrence
        return _density_of_inputs(v)

    def sources(self) -> dict[str, Source]:
        """Decays from a spectrum, input gates that start at one."""
        return {"log_decay": Spectrum("log_decay"), "log_input": Learned(0.0)}

    def state_size(self, D: int, M: int) -> StateSize:
        """C; n and m."""
        return StateSize(mean=D * M, covariance=D + 1)

    def state_formula(self) -> str:
        """C, n and m."""
        return "D·M + D + 1"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Decay, write and read of both sums."""
        return "D·M", 3 * D * (M + 1)

    def assumptions(self) -> Assumptions:
        """Additive writes, and a normaliser."""
        return Assumptions("ScalarDecay", "ExponentialInput", "Normaliser")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Unit, sums, ratio."""
        return (
            (
                "unit",
                (Equation("m_t = max(log f_t + m_{t-1}, ĩ_t)", r"m_t = \max(\log f_t + m_{t-1},\ \tilde{\imath}_t)"),),
            ),
            (
                "write",
                (
                    Equation(
                        "C_t = e^(log f_t + m_{t-1} − m_t) C_{t-1} + e^(ĩ_t − m_t) k_t v_tᵀ",
                        r"\mathbf{C}_t = e^{\log f_t + m_{t-1} - m_t} \mathbf{C}_{t-1} + "
                        r"e^{\tilde{\imath}_t - m_t} \mathbf{k}_t \mathbf{v}_t^\top",
                    ),
                    Equation(
                        "n_t = e^(log f_t + m_{t-1} − m_t) n_{t-1} + e^(ĩ_t − m_t) k_t",
                        r"\mathbf{n}_t = e^{\log f_t + m_{t-1} - m_t} \mathbf{n}_{t-1} + "
                        r"e^{\tilde{\imath}_t - m_t} \mathbf{k}_t",
                    ),
                ),
            ),
            (
                "read",
                (
                    Equation(
                        "y_t = C_tᵀ q_t / max(|n_tᵀ q_t|, e^(−m_t))",
                        r"\mathbf{y}_t = \mathbf{C}_t^\top \mathbf{q}_t / "
                        r"\max(|\mathbf{n}_t^\top \mathbf{q}_t|,\ e^{-m_t})",
                    ),
                ),
            ),
        )


def running_maxima(start: Tensor, log_decay: Tensor, gate: Tensor) -> Tensor:
    """m_t = max(log_decay_t + m_{t-1}, gate_t) for all tokens, [B,T,H], from m_0 = start, [B,H].

    Inside a piece m_t = F_t + max(m_0, max_{s≤t} (gate_s − F_s)), where F sums the decays since its start.
    """
    import torch

    every = []
    for decays, gates in zip(log_decay.split(SCALES_AT_ONCE, 1), gate.split(SCALES_AT_ONCE, 1), strict=True):
        total = decays.cumsum(1)
        every.append(total + torch.maximum(start[:, None], (gates - total).cummax(1).values))
        start = every[-1][:, -1]
    return torch.cat(every, 1)


def _density_of_inputs(v: Tensor) -> Tensor:
    """Log N(v; 0, I), [...]."""
    return gaussian_log_density(v, v.new_ones(()).expand(*v.shape[:-1], 1))
