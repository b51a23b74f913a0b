"""A native function with a gradient: called as it is in eager mode, and as torch custom operators by torch.compile."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from membydesign.ops import native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def structure(numbers: str, pointers: str) -> type[ctypes.Structure]:
    """A C struct of whole numbers and then pointers, by the names of its fields."""
    fields = [(n, ctypes.c_int64) for n in numbers.split()] + [(p, ctypes.c_void_p) for p in pointers.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})


def filled(
    struct: type[ctypes.Structure], tensors: Mapping[str, Tensor | None], **numbers: int
) -> tuple[ctypes.Structure, list[Tensor]]:
    """The C view of contiguous tensors, and the tensors that it points into; None becomes a null pointer."""
    alive = {name: x.contiguous() for name, x in tensors.items() if x is not None}
    return struct(**numbers, **{name: x.data_ptr() for name, x in alive.items()}), list(alive.values())


def call(source: str, name: str, dtype: torch.dtype, x: ctypes.Structure, y: ctypes.Structure, heads: int) -> None:
    """Run a function of a source over independent heads, on torch's threads."""
    compiled = native.library(source, dtype)
    assert compiled is not None
    function = getattr(compiled, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    function(ctypes.byref(x), ctypes.byref(y), heads, min(heads, torch.get_num_threads()))


class Operator(NamedTuple):
    """What `differentiable` makes.

    Attributes:
        apply: the function, for tensors with or without gradients.
        forward: the torch operator behind it under torch.compile.
    """

    apply: Callable[..., tuple[Tensor, ...]]
    forward: Any


def differentiable(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    shapes: Callable[..., tuple[Tensor, ...]],
    shapes_back: Callable[..., tuple[Tensor, ...]],
    remember: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
    gradients: Callable[[Callable[..., tuple[Tensor, ...]], Any, Sequence[Tensor | None]], tuple[Tensor | None, ...]],
    saved: int,
) -> Operator:
    """Pair a native forward with its backward.

    Args:
        name: of the torch operators.
        forward: its last argument says whether to save what backward needs.
        backward: the gradients.
        shapes: empty results of `forward`, for torch.compile.
        shapes_back: empty results of `backward`.
        remember: puts into a context what backward needs, from inputs and outputs.
        gradients: calls backward with what the context has and the gradients of outputs, None for those that nothing
            depends on; returns one gradient for each argument of `forward`.
        saved: how many of the last outputs are for backward alone.
    """
    forward_operator = torch.library.custom_op(f"membydesign::{name}_forward", forward, mutates_args=())
    backward_operator = torch.library.custom_op(f"membydesign::{name}_backward", backward, mutates_args=())
    forward_operator.register_fake(shapes)
    backward_operator.register_fake(shapes_back)
    forward_operator.register_autograd(
        lambda ctx, *grads: gradients(backward_operator, ctx, grads),
        setup_context=lambda ctx, inputs, output: remember(ctx, inputs, output),
    )

    class Eager(torch.autograd.Function):
        """The same without the dispatcher, whose first call would import torch's compiler for a few seconds."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            found = forward(*inputs)
            ctx.set_materialize_grads(False)
            if inputs[-1]:
                remember(ctx, inputs, found)
            ctx.mark_non_differentiable(*found[len(found) - saved :])
            return found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            refuse_second_derivatives(grads)
            return gradients(backward, ctx, grads)

    def apply(*inputs: Any) -> tuple[Tensor, ...]:
        save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if torch.compiler.is_compiling():
            return forward_operator(*inputs, save)
        return Eager.apply(*inputs, save)

    return Operator(apply, forward_operator)


def refuse_second_derivatives(grads: Sequence[Tensor | None]) -> None:
    """A backward written by hand has no backward of its own: say so instead of returning a part of the answer."""
    if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
        raise RuntimeError(
            'this filter can be differentiated once, and create_graph=True asks for more; use method="recurrent"'
        )


def apart(x: Tensor, dim: int) -> Tensor:
    """Pairs of rows de-interleaved along an axis (counted from the end): real parts, then imaginary parts."""
    return x.unflatten(dim, (-1, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def together(x: Tensor, dim: int) -> Tensor:
    """The inverse of `apart`."""
    return x.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)
