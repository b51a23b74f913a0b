r"""Designs whose memory is a linear recurrence once the keys are known: the base of delta rules without a covariance.

At every token each row of a matrix decays, and then takes in n writes, one after the other:

    W ← diag(a_t) W
    W ← W + d_tj (u_tj − Wᵀ e_tj)ᵀ,   j = 1, …, n          or, without an error to correct,   W ← W + d_tj u_tjᵀ

Decays a, directions d, keys e and values u may depend on everything but W, so a whole sequence of them is known in
advance, and every `LinearRecurrence` runs on the chunked mean pass (`filter/torch/recurrence.py`).

`ChosenGain` is the common case of a published delta rule: its direction d is a formula of keys and gates, where a
filter would derive it from a covariance.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from membydesign.belief import Belief, gaussian_log_density
from membydesign.design.passage import MeanMap
from membydesign.design.protocol import Design, Reading, Written
from membydesign.design.schema import Equation, StateSize
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from membydesign.design.passage import Passage
    from membydesign.design.protocol import State, Step
    from membydesign.state import Sizes


class Accumulate(Protocol):
    """Sums that fade: a_t = exp(log_decay_t) a_{t-1} + added_t, for all tokens at once."""

    def __call__(self, start: Tensor, log_decay: Tensor, added: Tensor) -> Tensor:
        """The sums after every token, [B,T,H,N], from start [B,H,N], log_decay [B,T,H] and added [B,T,H,N]."""
        ...


class Recurrence(NamedTuple):
    """A linear recurrence over a whole sequence, for the chunked kernels.

    Attributes:
        log_decay: log a, at most 0, before the writes of a token: [B,T,H,1] or [B,T,H,D].
        direction: d, where each write lands, [B,T,H,n,D].
        value: u, what it brings, [B,T,H,n,N].
        key: e, whose content is taken off the value, [B,T,H,n,D]; None for writes that only add.
        kept: what a state keeps besides the matrix after the last token.
        aside: what reading needs besides the matrix, such as a scale.
    """

    log_decay: Tensor
    direction: Tensor
    value: Tensor
    key: Tensor | None
    kept: Any = None
    aside: Any = None


class LinearRecurrence(Design):
    """A design whose state has a matrix W that follows a `Recurrence`.

    Derive from it, implement the steps of a `Design` (they are the specification), and say the same of a sequence:
    `matrix`, `state_of` and `recurrence`, and `outputs` and `log_densities` where they are not the plain ones.
    """

    @abstractmethod
    def matrix(self, state: State) -> Tensor:
        """W, [B,H,D,N]."""

    @abstractmethod
    def state_of(self, matrix: Tensor, kept: Any) -> State:
        """The state with this matrix, and with what `Recurrence.kept` holds."""

    @abstractmethod
    def recurrence(
        self, state: State, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], accumulate: Accumulate
    ) -> Recurrence:
        """The recurrence of a whole sequence.

        Args:
            state: before the first token.
            k: keys, [B,T,H,D].
            v: values, [B,T,H,M].
            parameters: step parameters by name, [B,T,H,...].
            accumulate: computes fading sums in chunks, for recurrences that rest on another one.
        """

    def outputs(self, y: Tensor, recurrence: Recurrence) -> Tensor:
        """What is read, [B,T,H,M], from Wᵀq, [B,T,H,N]."""
        del recurrence
        return y

    @abstractmethod
    def log_densities(self, v: Tensor, error: Tensor | None, recurrence: Recurrence) -> Tensor:
        """How expected the writes were, [B,T,H].

        Args:
            v: values, [B,T,H,M].
            error: u − Wᵀe of every write, [B,T,H,n,N]; None if the recurrence has no keys.
            recurrence: as `recurrence` returned it.
        """


class Writes(NamedTuple):
    """The writes of a token, or of many: axes [..., n, ·].

    Attributes:
        key: e, whose content is compared with the value, [..., n, D].
        direction: d, where the error is written, strength included, [..., n, D].
        value: u, [..., n, M].
    """

    key: Tensor
    direction: Tensor
    value: Tensor


class ChosenGain(LinearRecurrence):
    r"""A delta rule whose gain is chosen, not derived: $M \leftarrow M + d_t (u_t - M^\top e_t)^\top$.

    In a filter the gain is $\bar P_t k_t / (r_t^2 + k_t^\top \bar P_t k_t)$. Here the network names a direction and a
    strength by itself, so no belief about the error remains: nothing is known of the uncertainty, and a write may
    overshoot. The update is one step of gradient descent on $-\log\mathcal N(u_t \mid M^\top e_t, I)$, preconditioned
    where $d_t$ is not a multiple of $e_t$. That density, before the step, is the log evidence of a write.

    Derive from it with `log_decay` and `writes`.
    """

    exactness = "chosen gain"

    @abstractmethod
    def log_decay(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Log a, at most 0, [..., 1] for all rows together or [..., D]."""

    @abstractmethod
    def writes(self, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], kept: Any) -> Writes:
        """The writes of keys [..., D] and values [..., M].

        Args:
            k: keys.
            v: values.
            parameters: step parameters, with the same leading axes.
            kept: what the state keeps besides the mean, after it has taken in k; None if nothing.
        """

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> State:
        """Zeros."""
        import torch

        return Belief(torch.zeros(sizes, dtype=dtype, device=device))

    def matrix(self, state: State) -> Tensor:
        """M."""
        return state.mean

    def state_of(self, matrix: Tensor, kept: Any) -> State:
        """M, and nothing else."""
        return Belief(matrix, kept)

    def predict(self, state: State, step: Step) -> State:
        """M̄ = diag(a) M."""
        return state._replace(mean=self.log_decay(step).exp()[..., None] * state.mean)

    def condition(self, state: State, k: Tensor, v: Tensor, step: Step) -> Written:
        """M ← M + d (u − Mᵀe)ᵀ, for each write of the token."""
        keys, directions, values = self.writes(k, v, step, state[1])
        mean, log_density = state.mean, v.new_zeros(v.shape[:-1])
        one = v.new_ones(())[None]
        for j in range(keys.shape[-2]):
            error = values[..., j, :] - product(keys[..., j : j + 1, :], mean)[..., 0, :]
            log_density = log_density + gaussian_log_density(error, one.expand(*error.shape[:-1], 1))
            mean = mean + directions[..., j, :, None] * error[..., None, :]
        return Written(state._replace(mean=mean), log_density)

    def read(self, state: State, q: Tensor, step: Step) -> Reading:
        """Mᵀq."""
        del step
        return Reading(product(q[..., None, :], state.mean)[..., 0, :])

    def recurrence(
        self, state: State, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor], accumulate: Accumulate
    ) -> Recurrence:
        """The writes of all tokens at once."""
        del state, accumulate
        key, direction, value = self.writes(k, v, parameters, None)
        return Recurrence(self.log_decay(parameters), direction, value, key)

    def log_densities(self, v: Tensor, error: Tensor | None, recurrence: Recurrence) -> Tensor:
        """Of the errors of all writes, with variance one."""
        del v, recurrence
        assert error is not None
        return gaussian_log_density(error, error.new_ones(()).expand(*error.shape[:-1], 1)).sum(-1)

    def passages(self) -> tuple[Passage, ...] | str:
        """The mean, where nothing else is kept."""
        return (MeanMap(per_column="value"),)

    def state_size(self, D: int, M: int) -> StateSize:
        """The mean."""
        return StateSize(mean=D * M)

    def state_formula(self) -> str:
        """The mean."""
        return "D·M"

    def cost(self, D: int, M: int) -> tuple[str, int]:
        """Decay, prediction, write and read."""
        return "D·M", 4 * D * M


READ = Equation("y_t = M_tᵀ q_t", r"\mathbf{y}_t = \mathbf{M}_t^\top \mathbf{q}_t")
"""The plain read."""
SCALAR_DECAY = Equation("M̄_t = a_t M_{t-1}", r"\bar{\mathbf{M}}_t = a_t \mathbf{M}_{t-1}")
"""One decay for all rows."""
