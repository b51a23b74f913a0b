"""What every sequence layer is: `y, belief = layer(x, belief=None, *, cu_seqlens=None)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from membydesign.belief import Belief, destination
from membydesign.layers.finite import first_bad, weight_error
from membydesign.ops.checks import check_cu_seqlens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self


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
        """All of it."""
        return self.recurrent + self.convolution


@dataclass(frozen=True)
class LayerBelief:
    """All that a layer carries from one token to the next. Its fields are tensors whose first axis is the batch,
    `Belief`s, tuples of tensors, or None."""

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, such as ("memory.mean", …)."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value
            elif isinstance(value, tuple):
                names = value._fields if isinstance(value, Belief) else range(len(value))
                for name, part in zip(names, value, strict=True):
                    if part is not None:
                        yield f"{field.name}.{name}", part

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        """The belief whose `parts` these are."""
        values: dict[str, object] = {}
        for field in fields(cls):
            under = {name.partition(".")[2]: x for name, x in parts.items() if name.startswith(f"{field.name}.")}
            if field.name in parts:
                values[field.name] = parts[field.name]
            elif "mean" in under:
                values[field.name] = Belief(under["mean"], under.get("covariance"))
            elif under:
                values[field.name] = tuple(under[str(i)] for i in range(len(under)))
        return cls(**values)

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The same belief with f applied to every tensor, for example `belief.map(lambda x: x[:1])`."""
        return type(self)(*(_mapped(getattr(self, field.name), f) for field in fields(self)))

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same belief on another device, or in another type: float32 or float64, and never below.

        All floating-point numbers change their type. What a layer keeps in the type of its input, such as the tails of
        convolutions, returns to it with the next token.
        """
        place, dtype = destination(device, dtype)
        return self.map(lambda x: x.to(place, dtype if x.is_floating_point() else None))

    def detach(self) -> Self:
        """The same belief, cut off from the autograd graph."""
        return self.map(lambda x: x.detach())

    @property
    def batch(self) -> int:
        """How many sequences it belongs to."""
        return next(part.shape[0] for _, part in self.parts())


def _mapped(value: object, f: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Belief):
        return value.map(f)
    if isinstance(value, tuple):
        return tuple(f(part) for part in value)
    return f(value) if isinstance(value, Tensor) else value


class Uncertainty(NamedTuple):
    r"""What a layer can say about its own reads and writes.

    Attributes:
        variance: $q_t^\top P_t q_t$, how unsure each read is, [B,T,H,G]; None unless asked for.
        log_evidence: $\log p(v_t \mid v_{<t})$, how expected each write was, [B,T,H]; None unless asked for.
    """

    variance: Tensor | None = None
    log_evidence: Tensor | None = None


class SequenceLayer(nn.Module, ABC):
    """A layer that mixes tokens of a sequence, in order.

    `y, belief = layer(x)` runs over x, [B,T,hidden_size], and returns y of the same shape. Passing the belief on goes
    on where the last call stopped: any split of a sequence gives the same result as the whole. `cu_seqlens` ([N+1],
    B = 1) packs N sequences into one row; beliefs then have N entries.
    """

    hidden_size: int

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

    @abstractmethod
    def state_size(self) -> LayerStateSize | None:
        """Numbers kept per sequence between two tokens; None for a layer whose state grows with the sequence."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Give those parameters their starting values that are not weights of linear maps, convolutions or norms."""

    def check(self, x: Tensor, belief: LayerBelief | None, kind: type[LayerBelief], cu_seqlens: Tensor | None) -> int:
        """Refuse a bad x, cu_seqlens or belief; return how many sequences there are."""
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.hidden_size:
            got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: expected shape [B,T,{self.hidden_size}] (hidden_size), got {got}")
        if x.shape[1] < 1:
            raise ValueError(f"x: expected at least one token, got shape {list(x.shape)}")
        batch = x.shape[0] if cu_seqlens is None else len(check_cu_seqlens(cu_seqlens, x)) - 1
        if belief is None:
            return batch
        name = type(self).__name__
        if not isinstance(belief, kind):
            raise ValueError(f"belief: expected a {kind.__name__} of this {name}, got {type(belief).__name__}")
        if belief.batch != batch:
            raise ValueError(f"belief: expected one of {batch} sequences, as x has, got one of {belief.batch}")
        return batch

    def refuse_non_finite(self, x: Tensor, error: Exception) -> None:
        """After a filter has failed: say if x or the layer's own weights are to blame, neither of which it has seen."""
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
    """A whole number of at least one, or a ValueError that names it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return value


def shown_way(method: str, backend: str) -> list[str]:
    """How a filter is computed, for a layer's repr; nothing for the usual way."""
    return [] if (method, backend) == ("chunk", "auto") else [f"method={method!r}, backend={backend!r}"]


def heads_of(hidden_size: int, num_heads: int) -> int:
    """The size of a head where heads share the width among them; refuses heads that do not divide it."""
    if positive("hidden_size", hidden_size) % positive("num_heads", num_heads):
        raise ValueError(f"num_heads: expected a divisor of hidden_size = {hidden_size}, got {num_heads}")
    return hidden_size // num_heads


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(‖x‖² + ε), along the last axis, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
