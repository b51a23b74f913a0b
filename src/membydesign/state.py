"""What a memory carries from one token to the next: named tuples of tensors, whatever a design keeps in them.

A part is a tensor whose first axis is the batch, None, or a tuple of parts. Everything that moves, copies, saves or
joins states goes through these functions, so that a state of your own needs no code for any of it.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

S = TypeVar("S")


class Sizes(NamedTuple):
    """The sizes of a state: sequences, heads, rows and columns of a memory."""

    batch: int
    heads: int
    D: int
    M: int


def map_state(f: Callable[[Tensor], Tensor], state: S) -> S:
    """Apply f to every tensor of a state, for example `map_state(lambda x: x[:1], state)`."""
    return zip_states(lambda parts: f(parts[0]), [state])


def zip_states(f: Callable[[Sequence[Tensor]], Tensor], states: Sequence[S]) -> S:
    """Combine states of one form tensor by tensor: f takes the same part of each."""
    first: Any = states[0]
    every: Any = states
    if first is None:
        return first  # pyright: ignore[reportReturnType]
    if isinstance(first, Tensor):
        return f(every)  # pyright: ignore[reportReturnType]
    return _rebuilt(first, [zip_states(f, parts) for parts in zip(*every, strict=True)])


def named_tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with its name, such as ("mean", …) or ("covariance.factor", …)."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, tuple):
        for name, part in zip(_names(state), state, strict=True):
            yield from named_tensors(part, f"{prefix}.{name}" if prefix else name)


def form_of(state: Any) -> Any:
    """The form of a state in terms of JSON: "tensor", None, or [class name, {part: form}]."""
    if state is None or isinstance(state, Tensor):
        return None if state is None else "tensor"
    parts = zip(_names(state), state, strict=True)
    return [type(state).__name__, {name: form_of(part) for name, part in parts}]


def from_form(form: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, type], prefix: str = "") -> Any:
    """The state of a form that `form_of` described.

    Args:
        form: the description.
        tensors: by name, as `named_tensors` gives them.
        classes: named tuples by name; a class that is missing here is replaced by one with the same fields, which a
            filter accepts and returns in the design's own class.
        prefix: of the tensors' names.
    """
    if form is None:
        return None
    if form == "tensor":
        return tensors[prefix]
    kind, parts = form
    values = [from_form(part, tensors, classes, f"{prefix}.{name}" if prefix else name) for name, part in parts.items()]
    if kind == "tuple":
        return tuple(values)
    known = classes.get(kind) or namedtuple(kind, parts)
    return known(*values)


def detach(state: S) -> S:
    """The same state, cut off from the autograd graph."""
    return map_state(lambda x: x.detach(), state)


def destination(
    device: torch.device | str | torch.dtype | None, dtype: torch.dtype | None
) -> tuple[torch.device | None, torch.dtype | None]:
    """Where `to` brings a state; refuses types in which a covariance would not stay positive definite for long."""
    if isinstance(device, torch.dtype) and dtype is None:  # belief.to(torch.float64), as tensors have it
        device, dtype = None, device
    if device is not None and not isinstance(device, (str, torch.device)):
        raise ValueError(f'device: expected a device such as "cuda", got {device!r}')
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype: expected float32 or float64 for a belief, got {dtype!r}")
    return None if device is None else torch.device(device), dtype


def _names(parts: tuple[Any, ...]) -> Sequence[str]:
    return getattr(parts, "_fields", None) or [str(i) for i in range(len(parts))]


def _rebuilt(like: Any, parts: list[Any]) -> Any:
    return tuple(parts) if type(like) is tuple else type(like)(*parts)
