"""Layers whose memory is a design of ours: projections → step parameters → filter → read-out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, final, overload

from torch import Tensor

from membydesign.errors import FilterError
from membydesign.layers.base import LayerBelief, LayerStateSize, SequenceLayer, Uncertainty, positive, shown_way
from membydesign.ops import filter_sequence, filter_step
from membydesign.ops.filtering import check_way

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.belief import Belief
    from membydesign.design import DesignModel
    from membydesign.ops.filtering import Backend, Method


@final
@dataclass(frozen=True)
class FilterBelief(LayerBelief):
    """The belief of a layer that filters.

    Attributes:
        memory: of every head, as `filter_sequence` returns it.
        tails: the last inputs of each short convolution, [B,width-1,channels].
    """

    memory: Belief
    tails: tuple[Tensor, ...] = ()


class StepInputs(NamedTuple):
    """What a layer hands to its filter.

    Attributes:
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: values, [B,T,H,M].
        parameters: the step parameters that the design asks for, by name.
        aside: what the read-out needs besides x, such as a gate or a skip that was projected together with q, k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: Mapping[str, Tensor | float]
    aside: tuple[Tensor, ...] = ()


class FilterLayer(SequenceLayer):
    """A layer that runs the filter of a design between its projections and its read-out.

    Args:
        design: what the memory assumes.
        hidden_size: the width of x and y.
        num_heads: H.
        key_dim: D, rows of each head's memory.
        value_dim: M, columns of each head's memory.
        method: "chunk" or "recurrent", as `filter_sequence` takes it.
        backend: likewise; "torch" can be differentiated more than once.

    `method` and `backend` say how the filter is computed, not what it is: they are attributes, and may be set at any
    time.
    """

    method: Method = "chunk"  # also of layers that were pickled before they had it
    backend: Backend = "auto"

    def __init__(
        self,
        design: DesignModel,
        hidden_size: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_way(method, backend)
        self.design, self.method, self.backend = design, method, backend
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        self.key_dim, self.value_dim = positive("head_dim", key_dim), positive("value_dim", value_dim)
        refused = design.transition.refuse_key_size(key_dim)
        if refused:
            raise ValueError(f"head_dim: expected {refused}, got {key_dim}")
        if value_dim % design.write.groups:
            raise ValueError(
                f"groups: expected a divisor of value_dim = {value_dim} (value columns of a head), "
                f"got {design.write.groups}"
            )

    @abstractmethod
    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Queries, keys, values and step parameters of x, [B,T,hidden_size], and the new tails of convolutions."""

    @abstractmethod
    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """From what the memories gave, [B,T,H,M], to the layer's output, [B,T,hidden_size]."""

    @property
    def tail_size(self) -> int:
        """Elements of all tails of one sequence."""
        return 0

    def state_size(self) -> LayerStateSize:
        """Numbers kept per sequence between two tokens."""
        of_head = self.design.state_size(self.key_dim, self.value_dim)
        return LayerStateSize(self.num_heads * of_head.mean, self.num_heads * of_head.covariance, self.tail_size)

    def extra_repr(self) -> str:
        """Design and sizes, and how the filter is computed if not as usual."""
        design = self.design
        lines = [
            f"design={design.title!r}: {design.transition}, {design.write}, {design.covariance}",
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, D={self.key_dim}, M={self.value_dim}",
        ]
        return "\n".join((*lines, *shown_way(self.method, self.backend)))

    @overload
    def forward(
        self, x: Tensor, belief: LayerBelief | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, FilterBelief]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_variance: Literal[True],
        return_evidence: bool = False,
    ) -> tuple[Tensor, FilterBelief, Uncertainty]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: Literal[True],
    ) -> tuple[Tensor, FilterBelief, Uncertainty]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: bool = False,
    ) -> tuple[Tensor, FilterBelief] | tuple[Tensor, FilterBelief, Uncertainty]: ...

    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: bool = False,
    ) -> tuple[Tensor, FilterBelief] | tuple[Tensor, FilterBelief, Uncertainty]:
        """Mix x, starting from a belief.

        Args:
            x: [B,T,hidden_size].
            belief: from an earlier call; None starts from the prior.
            cu_seqlens: boundaries of packed sequences, [N+1], with B = 1.
            return_variance: also return how unsure each read is.
            return_evidence: also return how expected each write was.

        Returns:
            y, [B,T,hidden_size], and the new belief; and an `Uncertainty` if variance or evidence were asked for. All
            of it has gradients.
        """
        self.check(x, belief, FilterBelief, cu_seqlens)
        assert belief is None or isinstance(belief, FilterBelief)
        tail_size = 0 if belief is None else sum(tail[0].numel() for tail in belief.tails)
        if belief is not None and tail_size != self.tail_size:
            raise ValueError(
                f"belief.tails: expected {self.tail_size} elements per sequence, as the convolutions of this "
                f"{type(self).__name__} keep, got {tail_size}"
            )
        inputs, tails = self.step_inputs(x, None if belief is None else belief.tails, cu_seqlens)
        asks = return_variance or return_evidence
        try:
            if x.shape[1] == 1 and belief is not None and cu_seqlens is None and not asks:
                y, memory = self._step(inputs, belief.memory)
                return self.read_out(y[:, None], x, inputs), FilterBelief(memory, tails)
            out = filter_sequence(
                self.design,
                inputs.q,
                inputs.k,
                inputs.v,
                **inputs.parameters,  # pyright: ignore[reportArgumentType]
                initial=None if belief is None else belief.memory,
                cu_seqlens=cu_seqlens,
                method=self.method,
                backend=self.backend,
                return_variance=return_variance,
                return_evidence=return_evidence,
            )
        except (ValueError, FilterError) as error:
            self.refuse_non_finite(x, error)
            raise
        y = self.read_out(out.output, x, inputs)
        new = FilterBelief(out.belief, tails)
        return (y, new, Uncertainty(out.variance, out.write_log_evidence)) if asks else (y, new)

    def _step(self, inputs: StepInputs, memory: Belief) -> tuple[Tensor, Belief]:
        now = {name: p[:, 0] if isinstance(p, Tensor) else p for name, p in inputs.parameters.items()}
        return filter_step(self.design, memory, inputs.q[:, 0], inputs.k[:, 0], inputs.v[:, 0], **now)
