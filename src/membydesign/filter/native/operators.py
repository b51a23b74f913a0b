"""Native functions with gradients: called directly in eager mode, and as torch custom operators by torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from membydesign.filter import transforms

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.filter.native.description import Description


DESCRIBED: list[Description | Any] = []
"""What `differentiable` was called with, for `native.compiled`."""


class Operator(NamedTuple):
    """What `differentiable` makes.

    Attributes:
        apply: the function, for tensors with or without gradients: arguments and results by name.
        run: the same by position.
    """

    apply: Callable[..., dict[str, Tensor]]
    run: Callable[..., tuple[Tensor, ...]]


def differentiable(op: Description | Any) -> Operator:
    """Make a differentiable function of native code, or of any object with the attributes that are used here."""
    DESCRIBED.append(op)
    names, results = op.arguments[:-1], tuple(o.name for o in op.outputs)
    private = [place for place, o in enumerate(op.outputs) if o.private]
    shared = tuple(place for place, i in enumerate(op.inputs) if i.constant)
    shared_back = tuple(place for place, i in enumerate(op.kept) if i.constant)

    class Backward(torch.autograd.Function):
        """The native backward where torch follows it: folded by torch.vmap, and refused a derivative of its own."""

        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return op.backward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            """Keep nothing: there is no second backward."""

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
            return _mapped(Backward.apply, info.batch_size, in_dims, inputs, shared_back)

        backward = staticmethod(refuse_second_derivatives)
        jvp = staticmethod(refuse_tangents)

    def settle(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        if inputs[-1]:
            op.remember(ctx, inputs, output)
        ctx.mark_non_differentiable(*[output[place] for place in private])

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        transforms.refuse_legacy_vmap(grads)
        # With create_graph=True the gradients belong to a graph too, and must not look like constants of it.
        followed = torch.is_grad_enabled() or transforms.active()
        return op.gradients(Backward.apply if followed else op.backward, ctx, grads)

    class Eager(torch.autograd.Function):
        """The same without the dispatcher, whose first call would import torch's compiler for a few seconds."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            output = op.forward(*inputs)
            settle(ctx, inputs, output)
            return output

        backward = staticmethod(differentiate)
        jvp = staticmethod(refuse_tangents)

    class Transformed(torch.autograd.Function):
        """The same for torch.func, in the style that it asks for, which costs each call some 40 microseconds."""

        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return op.forward(*inputs)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
            return _mapped(Transformed.apply, info.batch_size, in_dims, inputs, shared)

        setup_context = staticmethod(settle)
        backward = staticmethod(differentiate)
        jvp = staticmethod(refuse_tangents)

    def apply(**arguments: Any) -> dict[str, Tensor]:
        inputs = [arguments.pop(name) for name in names]
        if arguments:
            raise TypeError(f"{op.name}: expected the arguments {', '.join(names)}, got also {', '.join(arguments)}")
        return dict(zip(results, run(*inputs), strict=True))

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if torch.compiler.is_compiling():
            from membydesign.filter.native import compiled

            return compiled.OPERATORS[op.name](*inputs, save)
        if transforms.active():  # a sample of torch.vmap does not say whether the whole needs a gradient
            return Transformed.apply(*inputs, torch.is_grad_enabled())
        return Eager.apply(*inputs, save)

    return Operator(apply, run)


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

    results = apply(*(folded(i, x, dim) for i, (x, dim) in enumerate(zip(inputs, in_dims, strict=True))))
    absent = [x.shape == (0,) for x in results]
    return (
        tuple(x if empty else x.unflatten(0, (samples, -1)) for x, empty in zip(results, absent, strict=True)),
        tuple(None if empty else 0 for empty in absent),
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
