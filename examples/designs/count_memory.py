r"""A memory of counts: a belief that is not Gaussian, as one whole `Design`.

Row i of memory is a slot with a rate λ_ij for each value column j, believed to be λ_ij ~ Gamma(a_ij, b_i): a_ij events
in the time b_i. A write watches slot i for the exposure k_i ≥ 0 and counts n_ij = k_i v_j events there:

    λ_ij before anything is written ~ Gamma(a₀, b₀)
    n_ij | λ_ij ~ Poisson(k_i λ_ij),   n_ij = k_i v_j                 write:    a ← a + k vᵀ,   b ← b + k
    λ_t = λ_{t-1} η/δ_t,   η ~ Beta(δ_t a, (1 − δ_t) a)               forget:   a ← δ_t a,      b ← δ_t b
    y_j = E Σ_i q_i λ_ij = Σ_i q_i a_ij / b_i                         read, with variance Σ_i q_i² a_ij / b_i²

Forgetting keeps every mean and widens it. The prior is conjugate, so all of this is exact: there is nothing to truncate
and nothing to correct. It is linear attention, normalised by the evidence b that each slot has really seen.

The log evidence is that of the counts: negative binomial for each slot and column, with p = b/(b + k_i). For one-hot
keys and whole v that is exactly log p(v_t | v_<t). For keys that are weights it is exactly log p(n_t | n_<t) of the
counts k_i v_j if these are whole; otherwise Γ functions continue it, and it scores writes without being normalised.

You write the state (any named tuple of tensors [B,H,...]), `prior`, `predict`, `condition`, `read`, the size of the
state and the equations. `key_bound` and `value_bound` refuse negative numbers by name, and let a `MemoryLayer` give
softmax keys and softplus values. Decoding, packing, resuming, autograd, layers, models, beam search, saving and the
contract test come for free; the loop over tokens runs it. A slot without any exposure loses a and b together: after
some 80/(1 − δ) such tokens both underflow in float32, and the filter raises instead of dividing 0 by 0.

This file shows how to write such a design from nothing. To use one, take `membydesign.CountMemory`: the same numbers
from chunked kernels, in torch and native code.

    layer = MemoryLayer(CountMemory(), hidden_size=64, num_heads=2, head_dim=32)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from membydesign import Design, Equation, Reading, Sizes, Spectrum, StateSize, Step, StepParameter, Written


class Counts(NamedTuple):
    """What every slot has seen: the events a of each column, [B,H,D,M], and the exposure b, [B,H,D]."""

    events: Tensor
    exposure: Tensor


@dataclass(frozen=True)
class CountMemory(Design):
    r"""Gamma–Poisson counts: $a_t = \delta_t a_{t-1} + k_t v_t^\top$, $b_t = \delta_t b_{t-1} + k_t$.

    Args:
        events: a₀ > 0, the events of every slot and column before anything is written.
        exposure: b₀ > 0, the exposure of every slot; an unwritten slot is read as a₀/b₀.

    Step parameters: `log_decay` log δ [B,T,H], at most 0.
    """

    events: float = 1.0
    exposure: float = 1.0
    title = "Count memory"
    exactness = "exact filter"
    step_parameters = (StepParameter("log_decay", "log δ_t", bound="<= 0"),)
    has_variance = True
    key_bound = value_bound = ">= 0"

    def __post_init__(self) -> None:
        for name, value in (("events", self.events), ("exposure", self.exposure)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"CountMemory({name}): expected a finite number above 0, got {value!r}")

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Counts:
        events = torch.full(sizes, self.events, dtype=dtype, device=device)
        return Counts(events, torch.full(sizes[:3], self.exposure, dtype=dtype, device=device))

    def predict(self, state: Counts, step: Step) -> Counts:
        decay = step["log_decay"].exp()
        return Counts(decay[..., None, None] * state.events, decay[..., None] * state.exposure)

    def condition(self, state: Counts, k: Tensor, v: Tensor, step: Step) -> Written:
        counted = k[..., :, None] * v[..., None, :]  # n, [B,H,D,M]
        (a, b), k = state, k[..., None]
        new = Counts(a + counted, b + step.k)
        ways = (a + counted).lgamma() - a.lgamma() - (counted + 1).lgamma()
        seen = k.clamp_min(torch.finfo(k.dtype).tiny).log() - new.exposure[..., None].log()  # log of 1 − p
        log_evidence = ways - a * (k / b[..., None]).log1p() + counted * seen
        return Written(new, log_evidence.sum((-2, -1)))

    def read(self, state: Counts, q: Tensor, step: Step) -> Reading:
        rates, weights = state.events / state.exposure[..., None], q[..., None]
        return Reading((weights * rates).sum(-2), (weights.square() * rates / state.exposure[..., None]).sum(-2))

    def gain_groups(self, M: int) -> int:
        """Every value column has a variance of its own."""
        return M

    def state_size(self, D: int, M: int) -> StateSize:
        return StateSize(mean=D * M, covariance=D)

    def sources(self) -> dict[str, Spectrum]:
        """Decays as the built-in ones have them: memories of 10 to 1,000 tokens."""
        return {"log_decay": Spectrum("log_decay")}

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        poisson = r"k_i v_j \mid \lambda_{ij} \sim \mathrm{Poisson}(k_i \lambda_{ij})"
        return (
            ("a write observes", (Equation("k_i v_j | λ_ij ~ Poisson(k_i λ_ij)", poisson),)),
            ("predict", (Equation("ā = δ_t a,  b̄ = δ_t b", r"\bar a = \delta_t a,\quad \bar b = \delta_t b"),)),
            ("write", (Equation("a = ā + k vᵀ,  b = b̄ + k", r"a = \bar a + k v^\top,\quad b = \bar b + k"),)),
            ("read", (Equation("y_t = Σ_i q_i a_i / b_i", r"y_t = \sum_i q_i\, a_i / b_i"),)),
        )
