"""Layers whose memory is a design of ours: projections → step parameters → filter → read-out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final, overload

import torch
from torch import Tensor

from membydesign.errors import FilterError
from membydesign.filter import Filtered, filter_sequence, filter_step
from membydesign.filter.api import check_method
from membydesign.filter.checks import check_design
from membydesign.layers.base import LayerBelief, LayerStateSize, SequenceLayer, Uncertainty, positive, shown_method
from membydesign.layers.convolution import ShortConvolution
from membydesign.state import Sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design import Design
    from membydesign.filter import Stretch
    from membydesign.filter.api import Backend, Method


@final
@dataclass(frozen=True)
class FilterBelief(LayerBelief):
    """The belief of a layer that filters.

    Attributes:
        memory: the state of every head's memory, as `filter_sequence` returns it.
        tails: the last inputs of each short convolution, [B,width-1,channels].
    """

    memory: Any
    tails: tuple[Tensor, ...] = ()


class StepInputs(NamedTuple):
    """What a layer hands to its filter.

    Attributes:
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: values, [B,T,H,M].
        parameters: the step parameters of the design, by name.
        aside: what the read-out needs besides x, such as a gate or a skip that was projected together with q, k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: Mapping[str, Tensor | float]
    aside: tuple[Tensor, ...] = ()


class Lengthened(NamedTuple):
    """Tokens of a stretch with those before it that a layer's short convolutions read.

    Attributes:
        x: [B,past+T,hidden_size].
        tails: what comes before them, for convolutions; None for zeros.
        cu_seqlens: boundaries of packed sequences, or None.
        past: how many tokens in front are those of other processes.
    """

    x: Tensor
    tails: tuple[Tensor, ...] | None
    cu_seqlens: Tensor | None
    past: int = 0

    def new(self, inputs: StepInputs) -> StepInputs:
        """The inputs of this process's own tokens."""
        if not self.past:
            return inputs

        def own(x: Any) -> Any:
            return x[:, self.past :] if isinstance(x, Tensor) else x

        parameters = {name: own(x) for name, x in inputs.parameters.items()}
        return StepInputs(own(inputs.q), own(inputs.k), own(inputs.v), parameters, tuple(map(own, inputs.aside)))


class FilterLayer(SequenceLayer):
    """A layer that runs the filter of a design between its projections and its read-out.

    Args:
        design: what the memory assumes.
        hidden_size: the width of x and y.
        num_heads: H.
        key_dim: D, rows of each head's memory.
        value_dim: M, columns of each head's memory.
        method: "chunk" or "recurrent", as `filter_sequence` takes it.
        backend: the backend of `filter_sequence`; "torch" can be differentiated more than once.

    `method` and `backend` select how the filter is computed and do not change what it computes. They are attributes
    that may be set at any time.

    Layers derived from this class choose the design and share these arguments. Each class documents only its own
    arguments, and where a meaning or a default differs:

    - `hidden_size`, `num_heads`, `method`, `backend`: as above.
    - `head_dim`: D, the `key_dim` above.
    - `value_dim`: M; default head_dim.
    - `short_convolution`: width of the causal convolutions, each followed by SiLU, on what the input is projected to
      (q, k and v); None for no convolutions.
    - `output_gate`: whether the normalised read is multiplied by SiLU(W_g x).
    - `num_key_heads`: heads of q and k, each shared by num_heads/num_key_heads heads of values; default num_heads.
    - `norm_eps`: ε of the norm of the read.
    """

    method: Method = "chunk"  # also of layers that were pickled before they had it
    backend: Backend = "auto"

    def __init__(
        self,
        design: Design,
        hidden_size: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_design(design)
        check_method(method, backend)
        self.design, self.method, self.backend = design, method, backend
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        self.key_dim, self.value_dim = positive("head_dim", key_dim), positive("value_dim", value_dim)
        for argument, reason, size in (
            ("head_dim", design.refuse_key_size(key_dim), key_dim),
            ("value_dim", design.refuse_value_size(value_dim), value_dim),
        ):
            if reason:
                raise ValueError(f"{argument}: expected {reason}, got {size}")

    @abstractmethod
    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute queries, keys, values and step parameters of x, [B,T,hidden_size], and the new tails."""

    @abstractmethod
    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Map what the memories returned, [B,T,H,M], to the layer's output, [B,T,hidden_size]."""

    @property
    def convolutions(self) -> list[ShortConvolution]:
        """The layer's short convolutions, in the order of their tails."""
        return [module for module in self.children() if isinstance(module, ShortConvolution)]

    @property
    def tail_size(self) -> int:
        """Elements of all tails of one sequence."""
        return sum(convolution.state_size for convolution in self.convolutions)

    @property
    def look_back(self) -> int:
        """How many earlier tokens `step_inputs` reads for each."""
        return max((convolution.width - 1 for convolution in self.convolutions), default=0)

    def why_not_split(self) -> None:
        """None: the filter, and the convolutions before it, can start in the middle of a sequence."""

    def reset_parameters(self) -> None:
        """Set the starting values of the convolutions."""
        for convolution in self.convolutions:
            convolution.reset_parameters()

    def state_size(self) -> LayerStateSize:
        """Count the numbers kept per sequence between two tokens."""
        of_head = self.design.state_size(self.key_dim, self.value_dim)
        return LayerStateSize(self.num_heads * of_head.mean, self.num_heads * of_head.covariance, self.tail_size)

    def initial_belief(self) -> FilterBelief:
        """Return the design's prior, and tails of zeros, for one sequence."""
        weight = next(self.parameters())
        sizes = Sizes(1, self.num_heads, self.key_dim, self.value_dim)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return FilterBelief(self.design.prior(sizes, dtype=dtype, device=weight.device), self._initial_tails(weight))

    def _initial_tails(self, like: Tensor) -> tuple[Tensor, ...]:
        """The tails before the first token, [1,width-1,channels], in the type of the weights."""
        return tuple(like.new_zeros(1, each.width - 1, each.channels) for each in self.convolutions)

    def extra_repr(self) -> str:
        """Show the design and the sizes, and how the filter is computed unless by default."""
        design = self.design
        lines = [
            f"design={design.title!r}: {design.summary()}",
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, D={self.key_dim}, M={self.value_dim}",
        ]
        return "\n".join((*lines, *shown_method(self.method, self.backend)))

    @overload
    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        stretch: Stretch | None = None,
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
        stretch: Stretch | None = None,
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
        stretch: Stretch | None = None,
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
        stretch: Stretch | None = None,
    ) -> tuple[Tensor, FilterBelief] | tuple[Tensor, FilterBelief, Uncertainty]: ...

    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: bool = False,
        stretch: Stretch | None = None,
    ) -> tuple[Tensor, FilterBelief] | tuple[Tensor, FilterBelief, Uncertainty]:
        """Mix x, starting from a belief.

        Args:
            x: [B,T,hidden_size].
            belief: from an earlier call; None starts from the prior.
            cu_seqlens: boundaries of packed sequences, [N+1], with B = 1.
            return_variance: also return how unsure each read is.
            return_evidence: also return how expected each write was.
            stretch: which tokens of a sequence that is split over processes x has, as `filter_sequence` takes it; the
                belief passed is the one before the whole sequence, the one returned that after the last token of x.

        Returns:
            y, [B,T,hidden_size], and the new belief; and an `Uncertainty` if variance or evidence were requested. All
            of it has gradients.
        """
        line = self._lengthened(x, belief, cu_seqlens, stretch)
        inputs, tails = self.step_inputs(line.x, line.tails, line.cu_seqlens)
        inputs = line.new(inputs)
        out = self._filter(x, inputs, belief, cu_seqlens, return_variance, return_evidence, stretch)
        y, new = self.read_out(out.output, x, inputs), FilterBelief(out.belief, tails)
        if return_variance or return_evidence:
            return y, new, Uncertainty(out.variance, out.write_log_evidence)
        return y, new

    def _lengthened(
        self, x: Tensor, belief: LayerBelief | None, cu_seqlens: Tensor | None, stretch: Stretch | None
    ) -> Lengthened:
        """Check x and a belief; return x after the tokens that its convolutions read from other processes."""
        tails = self._tails(x, belief, cu_seqlens, stretch)
        if stretch is None:
            return Lengthened(x, tails, cu_seqlens)
        line, past = stretch.with_past(x, self.look_back)
        bounds = stretch.own_bounds()
        if bounds is not None:
            bounds = torch.tensor([0, *(bound + past for bound in bounds[1:])], device=x.device)
        # tails come before the whole sequence: where tokens are missing between them and x, there are enough to read
        tails = stretch.own(tails) if stretch.tokens else None
        return Lengthened(line, tails, bounds, past)

    def _tails(
        self, x: Tensor, belief: LayerBelief | None, cu_seqlens: Tensor | None, stretch: Stretch | None = None
    ) -> tuple[Tensor, ...] | None:
        """Check x and a belief; return the tails of the belief, or None without one."""
        self.check(x, belief, FilterBelief, cu_seqlens, stretch)
        if belief is None:
            return None
        assert isinstance(belief, FilterBelief)
        tail_size = sum(tail[0].numel() for tail in belief.tails)
        if tail_size != self.tail_size:
            raise ValueError(
                f"belief.tails: expected {self.tail_size} elements per sequence, as the convolutions of this "
                f"{type(self).__name__} keep, got {tail_size}"
            )
        return belief.tails

    def _filter(
        self,
        x: Tensor,
        inputs: StepInputs,
        belief: LayerBelief | None,
        cu_seqlens: Tensor | None,
        return_variance: bool = False,
        return_evidence: bool = False,
        stretch: Stretch | None = None,
    ) -> Filtered:
        """Run the design's filter, as a decoding step if x is one token after a belief."""
        memory = belief.memory if isinstance(belief, FilterBelief) else None
        try:
            if (
                x.shape[1] == 1
                and memory is not None
                and cu_seqlens is None
                and stretch is None
                and not (return_variance or return_evidence)
            ):
                now = {name: p[:, 0] if isinstance(p, Tensor) else p for name, p in inputs.parameters.items()}
                y, memory = filter_step(self.design, memory, inputs.q[:, 0], inputs.k[:, 0], inputs.v[:, 0], **now)
                return Filtered(y[:, None], memory)
            return filter_sequence(
                self.design,
                inputs.q,
                inputs.k,
                inputs.v,
                **inputs.parameters,  # pyright: ignore[reportArgumentType]
                initial=memory,
                cu_seqlens=cu_seqlens,
                method=self.method,
                backend=self.backend,
                return_variance=return_variance,
                return_evidence=return_evidence,
                stretch=stretch,
            )
        except (ValueError, FilterError) as error:
            self.refuse_non_finite(x, error)
            raise
