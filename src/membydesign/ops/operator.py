"""A native function with a gradient: called as it is in eager mode, and as torch custom operators by torch.compile."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from membydesign.ops import native, transforms

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
    shared: tuple[int, ...] = (),
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
        shared: places of arguments without a batch axis, the same in `forward` and `backward`; all other tensors, and
            all results, have it first.
    """
    forward_operator = torch.library.custom_op(f"membydesign::{name}_forward", forward, mutates_args=())
    backward_operator = torch.library.custom_op(f"membydesign::{name}_backward", backward, mutates_args=())
    forward_operator.register_fake(shapes)
    backward_operator.register_fake(shapes_back)
    forward_operator.register_autograd(
        lambda ctx, *grads: gradients(backward_operator, ctx, grads),
        setup_context=lambda ctx, inputs, output: remember(ctx, inputs, output),
    )

    class Backward(torch.autograd.Function):
        """The native backward where torch follows it: folded by torch.vmap, and refused a derivative of its own."""

        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return backward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            """Keep nothing: there is no second backward."""

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
            return _mapped(Backward.apply, info.batch_size, in_dims, inputs, shared)

        backward = staticmethod(refuse_second_derivatives)
        jvp = staticmethod(refuse_tangents)

    def settle(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        if inputs[-1]:
            remember(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[len(output) - saved :])

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        transforms.refuse_legacy_vmap(grads)
        # With create_graph=True the gradients belong to a graph too, and must not look like constants of it.
        followed = torch.is_grad_enabled() or transforms.active()
        return gradients(Backward.apply if followed else backward, ctx, grads)

    class Eager(torch.autograd.Function):
        """The same without the dispatcher, whose first call would import torch's compiler for a few seconds."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            found = forward(*inputs)
            settle(ctx, inputs, found)
            return found

        backward = staticmethod(differentiate)
        jvp = staticmethod(refuse_tangents)

    class Transformed(torch.autograd.Function):
        """The same for torch.func, in the style that it asks for, which costs each call some 40 microseconds."""

        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return forward(*inputs)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
            return _mapped(Transformed.apply, info.batch_size, in_dims, inputs, shared)

        setup_context = staticmethod(settle)
        backward = staticmethod(differentiate)
        jvp = staticmethod(refuse_tangents)

    def apply(*inputs: Any) -> tuple[Tensor, ...]:
        save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if torch.compiler.is_compiling():
            return forward_operator(*inputs, save)
        if transforms.active():  # a sample of torch.vmap does not say whether the whole needs a gradient
            return Transformed.apply(*inputs, torch.is_grad_enabled())
        return Eager.apply(*inputs, save)

    return Operator(apply, forward_operator)


def _mapped(
    apply: Callable[..., tuple[Tensor, ...]],
    samples: int,
    in_dims: tuple[int | None, ...],
    inputs: tuple[Any, ...],
    shared: tuple[int, ...],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The rule for torch.vmap: samples become entries of the batch, the first axis of all but the `shared` inputs."""

    def folded(i: int, x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        if i in shared:  # the same for all samples, though torch.vmap may have copied it
            return x if dim is None else x.select(dim, 0)
        x = x.expand(samples, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    found = apply(*(folded(i, x, dim) for i, (x, dim) in enumerate(zip(inputs, in_dims, strict=True))))
    unasked = [x.shape == (0,) for x in found]
    return (
        tuple(x if empty else x.unflatten(0, (samples, -1)) for x, empty in zip(found, unasked, strict=True)),
        tuple(None if empty else 0 for empty in unasked),
    )


def refuse_second_derivatives(ctx: Any, *grads: Tensor | None) -> NoReturn:
    """A backward written by hand has no backward of its own: say so instead of returning a part of the answer."""
    del ctx, grads
    raise RuntimeError(
        "this filter's native code can be differentiated once, and a derivative of its gradient was asked for; "
        'use backend="torch" (an argument of filter_sequence and of layers), which can be differentiated again'
    )


def refuse_tangents(ctx: Any, *tangents: Tensor | None) -> NoReturn:
    """Native code has no forward-mode derivative."""
    del ctx, tangents
    raise RuntimeError(
        'this filter\'s native code has no forward-mode derivative (jvp); use backend="torch", or leave backend="auto"'
    )


def apart(x: Tensor, dim: int) -> Tensor:
    """Pairs of rows de-interleaved along an axis (counted from the end): real parts, then imaginary parts."""
    return x.unflatten(dim, (-1, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def together(x: Tensor, dim: int) -> Tensor:
    """The inverse of `apart`."""
    return x.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)
