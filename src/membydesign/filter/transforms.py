"""What torch does to the tensors that a filter is given: torch.func's transforms, and forward-mode derivatives.

Native code reads memory, so it must know. `operator.py` teaches it `torch.func.grad`, `vjp` and `vmap`; tangents and
derivatives of derivatives are left to the torch form, which has them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch._C._functorch as _functorch
from torch.autograd import forward_ad

from membydesign.filter import readable
from membydesign.filter.readable import dtensor_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def active() -> bool:
    """Whether a transform of torch.func is running: grad, vjp, vmap, jvp, …"""
    return torch._C._are_functorch_transforms_active()


active._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # asked by torch.compile, not traced


def transformed() -> bool:
    """Whether torch.func transforms what happens to tensors, or forward-mode derivatives follow it."""
    return forward_ad._current_level >= 0 or active()


def followed() -> bool:
    """Whether torch follows what happens to tensors, which native code hides: transforms, tangents, modes."""
    # As `transformed`, without the calls: every decoding step asks.
    return (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def beyond_native() -> bool:
    """Whether tangents, or gradients of gradients, are asked for: native code has neither.

    Under torch.compile any transform is beyond it: the operators that stand for it in a graph have no rules for them.
    """
    if torch.compiler.is_compiling():
        return active()
    if forward_ad._current_level >= 0:
        return True
    if not active():
        return False
    kinds = [interpreter.key() for interpreter in _functorch.get_interpreter_stack()]
    return kinds.count(_functorch.TransformType.Grad) > 1


def refuse_legacy_vmap(grads: Sequence[Tensor | None]) -> None:
    """Refuse gradients that are mapped by torch's vmap of old, which knows no rule for native code."""
    if any(g is not None and _functorch.is_legacy_batchedtensor(g) for g in grads):
        raise RuntimeError(
            "is_grads_batched: expected False (and vectorize=False of torch.autograd.functional) with native code, "
            'got True; use backend="torch", or torch.func, which maps native code too'
        )


def hidden(x: Tensor) -> bool:
    """Whether x has no values that could be read: while torch.compile traces, on the meta device, in fake tensors."""
    return torch.compiler.is_compiling() or x.is_meta or readable.is_fake(x)


def values(x: Tensor) -> Tensor:
    """The numbers of x, to be read: without graph, tangent or wrapper.

    Where torch.vmap maps over x, those of all its samples: the axes that it maps come first. Of a DTensor, those that
    this process holds.
    """
    kind = dtensor_class()
    if kind is not None and isinstance(x, kind):
        return x.detach().to_local()  # pyright: ignore[reportAttributeAccessIssue]
    while _functorch.is_functorch_wrapped_tensor(x):
        mapped = _functorch.maybe_get_bdim(x)
        x = _functorch.get_unwrapped(x)
        x = x if mapped < 0 else x.movedim(mapped, 0)
    return x.detach()
