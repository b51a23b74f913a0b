"""The interface of every sequence layer: `y, belief = layer(x, belief=None, *, cu_seqlens=None)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from membydesign.belief import Belief, BlockBelief, DiagonalBelief, LowRankBelief, Resolved, ScaledBelief
from membydesign.design import IsotropicBelief
from membydesign.errors import check_whole_number
from membydesign.filter.checks import check_cu_seqlens
from membydesign.layers.finite import first_bad, weight_error
from membydesign.state import destination, form_of, from_form, map_state, named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

    from membydesign.filter import Stretch


class LayerStateSize(NamedTuple):
    """Numbers that a layer keeps between two tokens, for one sequence.

    Attributes:
        mean: elements of the memories' means, over all heads.
        covariance: elements of their covariances.
        convolution: elements of the tails of short convolutions and token shifts.
    """

    mean: int
    covariance: int = 0
    convolution: int = 0

    @property
    def recurrent(self) -> int:
        """Mean and covariance together: what the paper matches between models."""
        return self.mean + self.covariance

    @property
    def total(self) -> int:
        """All elements."""
        return self.recurrent + self.convolution


@dataclass(frozen=True)
class LayerBelief:
    """The state that a layer carries from one token to the next.

    Its fields are tensors whose first axis is the batch, named tuples of tensors (the state of a design), tuples of
    tensors, or None.
    """

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, such as ("memory.mean", …)."""
        for field in fields(self):
            yield from named_tensors(getattr(self, field.name), field.name)

    def form(self) -> dict[str, Any]:
        """Describe every field in terms of JSON; `of_parts` rebuilds the belief from it."""
        return {field.name: form_of(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor], form: Mapping[str, Any]) -> Self:
        """Rebuild a belief from its `parts` and `form`."""
        return cls(**{name: from_form(part, parts, STATES, name) for name, part in form.items()})

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """Apply f to every tensor, for example `belief.map(lambda x: x[:1])`."""
        return type(self)(*(map_state(f, getattr(self, field.name)) for field in fields(self)))

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move the belief to another device, or convert it to float32 or float64.

        All floating-point numbers change their type. What a layer keeps in the type of its input, such as the tails of
        convolutions, returns to it with the next token.
        """
        place, dtype = destination(device, dtype)
        return self.map(lambda x: x.to(place, dtype if x.is_floating_point() else None))

    def detach(self) -> Self:
        """Detach the belief from the autograd graph."""
        return self.map(lambda x: x.detach())

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return next(part.shape[0] for _, part in self.parts())


STATES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (Belief, DiagonalBelief, IsotropicBelief, BlockBelief, LowRankBelief, Resolved, ScaledBelief)
}
"""The states of built-in designs, by the names that saved files have for them."""


class Uncertainty(NamedTuple):
    r"""What a layer knows about its own reads and writes.

    Attributes:
        variance: $q_t^\top P_t q_t$, how unsure each read is, [B,T,H,G]; None unless requested.
        log_evidence: $\log p(v_t \mid v_{<t})$, how expected each write was, [B,T,H]; None unless requested.
    """

    variance: Tensor | None = None
    log_evidence: Tensor | None = None


class SequenceLayer(nn.Module, ABC):
    """A layer that mixes tokens of a sequence, in order.

    `y, belief = layer(x)` runs over x, [B,T,hidden_size], and returns y of the same shape. Passing the belief to
    the next call continues the sequence: any split of a sequence gives the same result as the whole. `cu_seqlens`
    ([N+1], B = 1) packs N sequences into one row; beliefs then have N entries.
    """

    hidden_size: int
    no_initial_belief: str = "it does not override initial_belief, which an exported graph starts from"
    """Why `initial_belief` returns None, if it does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, and its hooks."""
        if "attention_mask" in kwargs:
            raise TypeError(
                f"attention_mask: expected cu_seqlens instead, since a {type(self).__name__} reads every token of x: "
                "pack sequences into one row without padding, or use MemoryModel, which takes an attention_mask"
            )
        return super().__call__(*args, **kwargs)

    @abstractmethod
    def forward(
        self, x: Tensor, belief: LayerBelief | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LayerBelief]:
        """Mix x, [B,T,hidden_size], starting from a belief; return y of the same shape and the new belief."""

    def why_not_split(self) -> str | None:
        """Why its tokens cannot be split over processes; None if `forward` takes a `stretch`.

        `forward` then gets this process's tokens of x alone, and returns their y.
        """
        return f"since {type(self).__name__} does not say what its tokens need from those of other processes"

    @abstractmethod
    def state_size(self) -> LayerStateSize | None:
        """Count the numbers kept per sequence between two tokens; None if the state grows with the sequence."""

    def initial_belief(self) -> LayerBelief | None:
        """Return the belief of one sequence before its first token; None (the default) if a layer cannot say."""
        return None

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set the starting values of all parameters except weights of `nn.Linear`, `nn.Conv1d` and norms."""

    def check(
        self,
        x: Tensor,
        belief: LayerBelief | None,
        kind: type[LayerBelief],
        cu_seqlens: Tensor | None,
        stretch: Stretch | None = None,
    ) -> int:
        """Refuse a bad x, cu_seqlens or belief; return the number of sequences."""
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.hidden_size:
            got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: expected shape [B,T,{self.hidden_size}] (hidden_size), got {got}")
        if stretch is not None:
            return self._check_stretch(x, belief, kind, cu_seqlens, stretch)
        if x.shape[1] < 1:
            raise ValueError(f"x: expected at least one token, got shape {list(x.shape)}")
        batch = x.shape[0] if cu_seqlens is None else len(check_cu_seqlens(cu_seqlens, x)) - 1
        self._check_belief(belief, kind, batch)
        return batch

    def _check_stretch(
        self,
        x: Tensor,
        belief: LayerBelief | None,
        kind: type[LayerBelief],
        cu_seqlens: Tensor | None,
        stretch: Stretch,
    ) -> int:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: expected None with a stretch, which has the boundaries, got some")
        if x.shape[1] != stretch.tokens:
            raise ValueError(f"x: expected the {stretch.tokens} tokens of the stretch, got shape {list(x.shape)}")
        batch = x.shape[0] if stretch.bounds is None else len(stretch.bounds) - 1
        self._check_belief(belief, kind, batch)
        return batch

    def _check_belief(self, belief: LayerBelief | None, kind: type[LayerBelief], batch: int) -> None:
        if belief is None:
            return
        name = type(self).__name__
        if not isinstance(belief, kind):
            raise ValueError(f"belief: expected a {kind.__name__} of this {name}, got {type(belief).__name__}")
        if belief.batch != batch:
            raise ValueError(f"belief: expected one of {batch} sequences, as x has, got one of {belief.batch}")

    def refuse_non_finite(self, x: Tensor, error: Exception) -> None:
        """After a filter has failed, raise a clearer error if x or the layer's weights are not finite."""
        if torch.compiler.is_compiling() or x.is_meta:
            return
        blamed = weight_error(type(self).__name__, self)
        if blamed is not None:
            raise blamed from error
        got = first_bad(x)
        if got is not None:
            raise ValueError(f"x: expected finite values, got {got}") from error
        of_belief = str(error).startswith(("belief", "initial"))
        if x.dtype == torch.float16 and "expected finite values" in str(error) and not of_belief:
            why = "x and the weights are finite, so the layer's own maps overflowed in float16; use bfloat16 or float32"
            raise ValueError(f"{error}: {why}") from error


def positive(name: str, value: object) -> int:
    """Return a whole number of at least one; refuse anything else by name."""
    return check_whole_number(name, value, 1)


def shown_method(method: str, backend: str) -> list[str]:
    """Show how a filter is computed in a layer's repr; nothing for the defaults."""
    return [] if (method, backend) == ("chunk", "auto") else [f"method={method!r}, backend={backend!r}"]


def heads_of(hidden_size: int, num_heads: int) -> int:
    """Return the size of a head if heads share the width; refuse a number of heads that does not divide it."""
    if positive("hidden_size", hidden_size) % positive("num_heads", num_heads):
        raise ValueError(f"num_heads: expected a divisor of hidden_size = {hidden_size}, got {num_heads}")
    return hidden_size // num_heads


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute x / √(‖x‖² + ε) along the last axis, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
