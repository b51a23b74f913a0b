r"""What every memory is: an initial belief, a transition, a write, and a read.

A memory holds a belief about a latent matrix $S_t$ of D rows and M columns. At each token the belief drifts
(`Design.predict`), is conditioned on the write $(k_t, v_t)$ (`Design.condition`), and is read at $q_t$ (`Design.read`).
`membydesign.filter.loop` runs these three over a sequence; layers, models, decoding, packing, saving and the contract
tests of `membydesign.testing` work for any `Design`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from membydesign.design.describe import Description
    from membydesign.design.passage import Passage
    from membydesign.design.schema import Bound, Equation, StateSize, StepParameter
    from membydesign.design.sources import Source
    from membydesign.state import Sizes

State = Any
"""A named tuple of tensors [B,H,...], None, or named tuples again: what a design keeps between two tokens."""


class Step(Mapping[str, "Tensor"]):
    """The step parameters of one token, by name: `step["write_noise"]`, [B,H,...].

    Attributes:
        k: the token's write key, [B,H,D], for reads that depend on the write just made.
    """

    __slots__ = ("_parameters", "k")

    def __init__(self, parameters: Mapping[str, Tensor], k: Tensor) -> None:
        self._parameters, self.k = parameters, k

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class Written(NamedTuple):
    r"""What `Design.condition` returns; a plain tuple of the first two is accepted as well.

    Attributes:
        state: the belief after the write.
        log_evidence: $\log p(v_t \mid v_{<t})$, [B,H].
        precision: the innovation precision β, [B,H,G], of designs that have one; the filter checks that it stays
            positive and within its bound.
    """

    state: State
    log_evidence: Tensor
    precision: Tensor | None = None


class Flaw(NamedTuple):
    """A condition that a state violates, if any entry of `where` is true.

    Attributes:
        part: which part of the state, such as "covariance".
        expected: what was expected of it.
        where: the entries that violate it, [B,H,...] (under torch.vmap with more axes in front).
        got: describes the violation at an index of `where`.
        error: the exception to raise.
    """

    part: str
    expected: str
    where: Tensor
    got: Callable[[list[int]], str]
    error: type[Exception] = ValueError


class Reading(NamedTuple):
    """What `Design.read` returns.

    Attributes:
        mean: the read-out, [B,H,M].
        variance: the variance of each of its coordinates, [B,H,G]; None for a design that has none.
    """

    mean: Tensor
    variance: Tensor | None = None


class Assumptions(NamedTuple):
    """What a design assumes, in one word each, for tables.

    Attributes:
        drift: how memory drifts.
        write: what a write observes.
        kept: what is kept besides the mean, or the kind of belief.
    """

    drift: str
    write: str
    kept: str


class Design(ABC):
    r"""The assumptions of a memory, and the filter that follows from them.

    Derive from it for a belief of any kind; for a linear-Gaussian memory compose a `DesignModel` instead. A design is
    immutable and hashable (a frozen dataclass is both) and holds no tensors that are learned.

    Attributes:
        title: what people call it.
        citation: the paper that it comes from.
        note: what a user should know about it.
        exactness: how the filter relates to exact conditioning: "exact filter", "covariance reset", "assumed density".
        step_parameters: what `filter_sequence` needs for every token and head besides q, k and v.
        groups: G, how many groups of value columns have uncertainty of their own.
        has_variance: whether `read` returns a variance.
        key_bound: the values that keys and queries may have: "finite", or ">= 0" for weights over slots.
        value_bound: the values that may be written.
    """

    title: str = "A design of your own"
    citation: str = ""
    note: str = ""
    exactness: str
    step_parameters: tuple[StepParameter, ...] = ()
    groups: int = 1
    has_variance: bool = False
    key_bound: Bound = "finite"
    value_bound: Bound = "finite"

    @property
    def is_exact(self) -> bool:
        """Whether the belief is that of exact conditioning, in all that is kept of it."""
        return self.exactness == "exact filter"

    @abstractmethod
    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> State:
        """The belief before anything is written: a named tuple of tensors whose first axes are [B,H]."""

    @abstractmethod
    def predict(self, state: State, step: Step) -> State:
        """The belief one token later, before its write: the transition law."""

    @abstractmethod
    def condition(self, state: State, k: Tensor, v: Tensor, step: Step) -> Written | tuple[State, Tensor]:
        r"""The belief given the write $v_t$ at key $k_t$, and how expected the write was.

        Args:
            state: what `predict` returned.
            k: the write key, [B,H,D].
            v: the written value, [B,H,M].
            step: the parameters of the token.
        """

    @abstractmethod
    def read(self, state: State, q: Tensor, step: Step) -> Reading:
        """The read-out at the query q, [B,H,D], after the token's write."""

    @abstractmethod
    def state_size(self, D: int, M: int) -> StateSize:
        """Elements kept per head between two tokens, for keys of size D and values of size M."""

    @abstractmethod
    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """Its equations by heading, in the order of a step: assume, predict, write, read."""

    @property
    def wrapped(self) -> Design | None:
        """The design whose means and gains this one has, if it only adds to its belief; None for all others."""
        return None

    def rewrap(self, wrapped: Design) -> Design:
        """The same addition to another design, of the kind that this one wraps."""
        raise TypeError(f"expected a design that wraps another, got {self.title} and {wrapped.title}")

    def gain_groups(self, M: int) -> int:
        """How many variances a read has, for values of size M."""
        del M
        return self.groups

    def refuse_key_size(self, D: int) -> str | None:
        """What D must be, if this design cannot have keys of size D ("an even D, since …"); None if it can."""
        del D
        return None

    def refuse_value_size(self, M: int) -> str | None:
        """What M must be, if this design cannot have values of size M; None if it can."""
        if M % self.groups:
            return f"M divisible by the design's {self.groups} noise groups"
        return None

    def observation_noise(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """r² of every write, [..., G], where the precision of `Written` is 1/(r² + …); None if there is no such r²."""
        del parameters
        return None

    def state_flaws(self, state: State, *, thorough: bool) -> list[Flaw]:
        """What may be wrong with a state of finite numbers, such as a negative variance.

        Args:
            state: of the design's own form, with finite numbers.
            thorough: whether flaws may be looked for that take a factorisation.
        """
        del state, thorough
        return []

    def sources(self) -> Mapping[str, Source]:
        """Where a layer takes step parameters from; parameters that are not named here follow their bounds."""
        return {}

    def with_stationary_noise(self) -> Design | None:
        """The same design with process noise that returns memory to its prior; None (the default) if unavailable."""
        return None

    def layer_key_size(self, D: int) -> int:
        """How many entries of each key and query a layer maps from its input."""
        return D

    def layer_keys(self, x: Tensor) -> Tensor:
        """Place what a layer mapped from its input, [..., layer_key_size], on the D rows of memory."""
        return x

    def layer_values(self, x: Tensor) -> Tensor:
        """Bring what a layer mapped from its input, [..., M], into `value_bound`: by softplus, if there is a bound."""
        if self.value_bound == "finite":
            return x
        from torch.nn.functional import softplus

        return softplus(x)

    def layer_parameters(self, parameters: Mapping[str, Tensor | float]) -> Mapping[str, Tensor | float]:
        """Bring the step parameters that a layer mapped from its input into a form that keeps memory stable.

        Bounds act on single numbers; override this for parameters that belong together, such as a key of length one.
        """
        return parameters

    def passages(self) -> tuple[Passage, ...] | str:
        """How its belief passes a stretch of tokens that starts from an unknown belief, part by part; or why it cannot.

        Processes that share a sequence then filter their stretches at the same time. The reason, by default that nobody
        said how, follows "for Title, "; stretches of such a design are filtered one after the other.
        """
        return f"since {type(self).__name__} does not say how its belief passes a stretch of tokens"

    def assumptions(self) -> Assumptions:
        """Its assumptions in one word each, for tables; by default the name of its class."""
        return Assumptions("", "", type(self).__name__)

    def state_formula(self) -> str:
        """The state size in the letters of the legend, such as `D·M + D²`; "" if only numbers are known."""
        return ""

    def cost(self, D: int, M: int) -> tuple[str, int] | None:
        """The order of work per token and head, and its multiplications; None if nobody counted them."""
        del D, M
        return None

    def summary(self) -> str:
        """Its assumptions on one line, for the repr of a layer."""
        return repr(self)

    def describe(self) -> Description:
        """Its equations, exactness, state size and cost, as text (`str`) and as LaTeX (`.latex`)."""
        from membydesign.design.describe import describe

        return describe(self)
