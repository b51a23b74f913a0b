"""Which tensors a kernel can read by their address: those whose numbers lie in memory of their own, as they are.

Others have none (tensor subclasses that wrap other tensors, fake tensors, storage that was freed), or memory holds
something else (negated views, tensors of zeros that exist only as a flag). torch's own operations treat each of them
correctly, except for freed storage, where they end the process.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch._C._functorch as _functorch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

LOWEST = 1 << 32
"""Addresses below this one are looked at twice: that of freed storage is 0, plus the offset of a view."""


def dtensor_class() -> Any:
    """Return torch's DTensor, or None where nobody has imported it, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


dtensor_class._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # not traced by torch.compile


PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of most tensors, which need no second look."""


@functools.lru_cache(maxsize=256)
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class handle operations themselves (`__torch_dispatch__`), and so may have no memory."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


def settled(x: Tensor) -> Tensor:
    """Return x with its numbers in memory, where a negated view or a flag stands for them."""
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def has_memory(x: Tensor) -> bool:
    """Whether the storage of a tensor that is not a wrapper holds all of its elements."""
    if not x.numel() or x._is_zerotensor():
        return True
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() >= (last + 1) * x.element_size()


def is_null(x: Tensor, address: int) -> bool:
    """Whether there is nothing at the address of x."""
    return address < LOWEST and x.numel() > 0 and (x._is_zerotensor() or not has_memory(x))


def is_fake(x: Tensor) -> bool:
    """Whether x stands for its shape and type alone, or a mode is active in which new tensors do."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    if type(x) in PLAIN and not torch._C._are_functorch_transforms_active():
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and module.is_fake(x)


def flaw(x: Tensor) -> tuple[str, str] | None:
    """What to expect instead of x, and what it is, if not even torch can read it; None if it can."""
    if type(x) in PLAIN and _is_filled(x):
        return None
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    if is_wrapper(type(x)) or x.is_meta:
        return None
    if x.layout is not torch.strided:
        return "a dense tensor (layout torch.strided)", f"one of layout {x.layout}"
    if not has_memory(x):
        return "a tensor with memory", f"one of shape {list(x.shape)} whose storage holds too little (was it freed?)"
    return None


def _is_filled(x: Tensor) -> bool:
    """Whether x is certain to have all of its memory: the quick answer for most tensors."""
    try:
        return x.data_ptr() >= LOWEST and x.untyped_storage().nbytes() >= x.numel() * x.element_size()
    except RuntimeError:  # no storage, as sparse tensors and those of torch.func
        return False


def why_not(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Why no kernel that reads memory can run with these tensors, which have names; None if one may."""
    for name, x in tensors:
        if type(x) not in PLAIN and is_wrapper(type(x)):
            return (
                f"with {name} of type {type(x).__name__}, since this kernel reads memory, which the type may not have"
            )
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return "in a FakeTensorMode, since this kernel reads memory"
    return None
