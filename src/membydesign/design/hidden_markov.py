r"""Discrete states: the exact filter of hidden Markov chains, one for each value column.

    z_j ∈ {1, …, D},   b_ij = p(z_j = i | past)                       belief: a distribution for each column
    z_t = z_{t-1} with probability a_t, else uniform (π = 1/D)        predict:  b̄ = a_t b + (1 − a_t) π
    log p(write | z_j = i) = k_i v_j                                  write:    b ∝ b̄ ⊙ exp(k vᵀ), for each column
    p(write | past) = Π_j Σ_i b̄_ij exp(k_i v_j)
    y_j = E q_{z_j} = Σ_i q_i b_ij                                    read, with variance Σ_i q_i² b_ij − y_j²

Beliefs are kept as logarithms: evidence that a state is impossible accumulates and can be withdrawn later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Written
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Spectrum

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from membydesign.design.protocol import Step
    from membydesign.design.sources import Source
    from membydesign.state import Sizes

FLOOR = 1e-30
"""Below this probability a restart is not worth adding, and the logarithm is taken of the surviving part alone."""


class StateBelief(NamedTuple):
    """What is believed of the hidden states.

    Attributes:
        log_belief: log b, [B,H,D,M]; each column sums to one over the D states.
    """

    log_belief: Tensor

    @property
    def belief(self) -> Tensor:
        """b, the probability of each state in each column, [B,H,D,M]."""
        return self.log_belief.exp()


@dataclass(frozen=True)
class HiddenMarkov(Design):
    r"""Hidden Markov chains over D states: $b_{ij} = p(z_j = i \mid \text{writes so far})$.

    $$\bar b = a_t b_{t-1} + (1 - a_t)\pi, \qquad b_t \propto \bar b \odot \exp(k_t v_t^\top), \qquad
    y_t = b_t^\top q_t$$

    Column j of memory is a chain that is in one of D states. At each token it stays with probability $a_t$ and
    otherwise jumps to a state drawn uniformly, $\pi_i = 1/D$. A write is evidence about the states: $k_i$ is the log
    likelihood of state i, and $v_j$ says how many times column j sees that evidence, so the log likelihood in column j
    is $k_i v_j$: v = 1 is the textbook filter, v = 0 leaves a column alone, and v < 0 takes evidence back. The read is
    the expectation of $q$ at the current state, $y_j = \mathrm{E}\,q_{z_j}$, with its variance.

    Without jumps (a = 1), $\log b_t$ is $\sum_s k_s v_s^\top$ up to a constant: linear attention, read through a
    softmax over rows. Jumps bound how sure the memory can become, and so how much evidence it takes to change it.

    The log evidence is $\sum_j \log \sum_i \bar b_{ij} \exp(k_i v_j)$. With normalised likelihoods, $k_i = \log p(x_t
    \mid z = i)$ and v = 1, that is exactly $\log p(x_t \mid x_{<t})$ of each column's chain. For keys and values that
    are not log likelihoods of something observed, it scores writes but is not normalised.

    Step parameters: `log_decay` log a [B,T,H], at most 0.

    Examples:
        >>> design = HiddenMarkov()
        >>> umbrella, none = [0.9, 0.2], [0.1, 0.8]  # their probabilities if it rains and if it does not
        >>> k = torch.tensor([umbrella, umbrella, none]).log()[None, :, None]
        >>> q, v = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2), torch.ones(1, 3, 1, 1)
        >>> out = filter_sequence(design, q, k, v, log_decay=math.log(0.4))  # the weather persists with 0.4 + 0.6/2
        >>> [round(p, 3) for p in out.output.flatten().tolist()]  # the probability of rain
        [0.818, 0.883, 0.191]
    """

    title = "Hidden Markov memory"
    citation = "Baum, Petrie, Soules & Weiss, Ann. Math. Statist. 1970; Rabiner, Proc. IEEE 1989"
    note = (
        "use it to track states: each value column is in one of D states, keys are log likelihoods of the states, and "
        "a value says how many times its column sees that evidence"
    )
    exactness = "exact filter"
    step_parameters = (StepParameter("log_decay", "log a_t", bound="<= 0"),)
    has_variance = True

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> StateBelief:
        """Uniform over the D states."""
        import torch

        return StateBelief(torch.full(sizes, -math.log(sizes.D), dtype=dtype, device=device))

    def predict(self, state: StateBelief, step: Step) -> StateBelief:
        """b̄ = a b + (1 − a) π."""
        return StateBelief(log_predicted(state.log_belief, step["log_decay"][..., None, None]))

    def condition(self, state: StateBelief, k: Tensor, v: Tensor, step: Step) -> Written:
        """b ∝ b̄ ⊙ exp(k vᵀ)."""
        del step
        joint = state.log_belief + k[..., :, None] * v[..., None, :]
        evidence = joint.logsumexp(-2)
        return Written(StateBelief(joint - evidence[..., None, :]), evidence.sum(-1))

    def read(self, state: StateBelief, q: Tensor, step: Step) -> Reading:
        """The mean and the variance of q over the states."""
        del step
        b, q = state.belief, q[..., None]
        mean = (b * q).sum(-2)
        return Reading(mean, (b * (q - mean[..., None, :]).square()).sum(-2))

    def gain_groups(self, M: int) -> int:
        """Every value column has its own variance."""
        return M

    def state_flaws(self, state: StateBelief, *, thorough: bool) -> list[Flaw]:
        """Columns that are not distributions."""
        del thorough
        total = state.log_belief.logsumexp(-2)

        def got(at: list[int]) -> str:
            return f"a column whose probabilities sum to {total[tuple(at)].exp().item():.6g}"

        return [Flaw("log_belief", "columns whose probabilities sum to 1", total.abs() > 1e-3, got)]

    def sources(self) -> Mapping[str, Source]:
        """Stays from a spectrum: heads start with jumps every 10 to 1,000 tokens."""
        return {"log_decay": Spectrum("log_decay")}

    def state_size(self, D: int, M: int) -> StateSize:
        """One probability for each state and column."""
        return StateSize(mean=D * M)

    def state_formula(self) -> str:
        """One probability for each state and column."""
        return "D·M"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Prediction, likelihood and read; besides two exponentials and a logarithm for each entry."""
        return "D·M", 3 * D * M

    def passages(self) -> str:
        """Why they are not used: they are D times as large as the belief."""
        return "since the map of a stretch is a D×D matrix for every value column, D times as large as the belief"

    def assumptions(self) -> Assumptions:
        """Chains that stay or jump, and likelihoods of states."""
        return Assumptions("StayOrJump", "Likelihood", "Discrete")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """The chain, its filter and its read."""
        return (
            (
                "memory drifts",
                (
                    Equation(
                        "z_t = z_{t-1} with probability a_t, else z_t ~ π = 1/D",
                        r"p(z_t \mid z_{t-1}) = a_t [z_t = z_{t-1}] + (1 - a_t)\, \pi_{z_t},\quad \pi_i = 1/D",
                    ),
                ),
            ),
            (
                "a write observes",
                (Equation("log p(write | z_j = i) = k_i v_j", r"\log p(\text{write} \mid z_j = i) = k_i v_j"),),
            ),
            ("predict", (Equation("b̄ = a_t b_{t-1} + (1 − a_t) π", r"\bar b = a_t b_{t-1} + (1 - a_t)\, \pi"),)),
            (
                "write",
                (
                    Equation(
                        "b_t ∝ b̄ ⊙ exp(k_t v_tᵀ)",
                        r"b_t \propto \bar b \odot \exp(\mathbf{k}_t \mathbf{v}_t^\top)",
                    ),
                ),
            ),
            ("read", (Equation("y_t = b_tᵀ q_t", r"\mathbf{y}_t = b_t^\top \mathbf{q}_t"),)),
        )


def log_predicted(log_belief: Tensor, log_stay: Tensor) -> Tensor:
    """Log b̄ = log(a b + (1 − a)/D), over states on the second last axis; exact also where b underflows and a is 1."""
    import torch

    states = log_belief.shape[-2]
    predicted = (log_belief + log_stay).exp() - log_stay.expm1() / states
    ordinary = predicted > FLOOR
    return torch.where(ordinary, torch.where(ordinary, predicted, 1.0).log(), log_belief + log_stay)
