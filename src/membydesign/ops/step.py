"""A decoding step in native code (`c/step.c`): every rule, with the four transitions, on a CPU, without a gradient.

It is tried first, and gives the step or declines: where it does not apply, and where anything is wrong with what it was
given or what it found. Then the long way runs, which knows what is wrong and says so. So all is asked here in the
cheapest way, and nothing is explained. Shapes are judged once for all steps that have them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from membydesign.belief import Belief
from membydesign.design import DampedRotation, DesignModel, Diagonal, DiagonalDecay, Identity, ScalarDecay
from membydesign.ops import native, transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SOURCE = "step.c"
THREADS_FROM = 1 << 16
"""Elements of all beliefs from which on it pays to wake threads."""

_RULES = ("kalman", "delta", "additive")
_TRANSITIONS = (Identity, ScalarDecay, DiagonalDecay, DampedRotation)
_PARAMETERS = {
    "process_noise": "l2",
    "write_noise": "r2",
    "prior_variance": "lambda",
    "log_decay": "log_a",
    "angle": "angle",
}
"""The names of `filter_step` and of step.c, in the order of the latter."""

_SIZES = ("heads", "D", "M", "N", "rule", "diagonal", "rotates", "every")
_STRIDES = tuple(f"{name}_{axis}" for name in _PARAMETERS.values() for axis in ("head", "entry"))


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _SIZES + _STRIDES]


class _Plan(NamedTuple):
    """What to call for given shapes, with which sizes and on how many threads at most."""

    function: Callable[..., int]
    sizes: Any
    threads: int


def native_step(
    design: DesignModel,
    belief: Belief,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor | float | None],
) -> tuple[Tensor, Belief] | None:
    """The read-out [B,H,M] and the new belief, or None; arguments as the user of `filter_step` gave them."""
    if not isinstance(design, DesignModel) or type(design.transition) not in _TRANSITIONS:
        return None
    if torch.compiler.is_compiling() or transforms.followed():
        return None
    dtype = belief.mean.dtype if isinstance(belief, Belief) and isinstance(belief.mean, Tensor) else None
    if dtype not in native.REALS:
        return None
    ready: list[Tensor | None] = []
    for x in (q, k, v, *belief, *[parameters[name] for name in _PARAMETERS]):
        ready.append(None if x is None else _ready(x, dtype))
        if x is not None and ready[-1] is None:
            return None
    plan = _plan(design, dtype, *[None if x is None else x.shape for x in ready])
    if plan is None or q.dtype != k.dtype or q.dtype != v.dtype:
        return None
    if belief.covariance is not None and belief.covariance.dtype != dtype:
        return None
    output, mean, covariance = [None if x is None else torch.empty_like(x) for x in ready[2:5]]
    assert output is not None
    assert mean is not None
    pointers = [None if x is None else x.data_ptr() for x in (*ready, mean, covariance, output)]
    if plan.function(plan.sizes, *pointers, min(plan.threads, torch.get_num_threads())):
        return None
    if q.dtype != dtype:
        output = output.to(q.dtype)
        if not output.isfinite().all():
            return None
    return output, Belief(mean, covariance)


def _ready(x: Tensor | float, dtype: torch.dtype) -> Tensor | None:
    """A plain tensor that native code can read, in the type of the belief; None of what has a gradient or is wider."""
    if type(x) is float or type(x) is int:
        return _number(float(x), dtype)
    if (type(x) is not Tensor and type(x) is not Parameter) or not x.is_cpu:
        return None
    if x.requires_grad and torch.is_grad_enabled():
        return None
    if x.dtype == dtype:
        return x.contiguous()
    narrower = x.is_floating_point() and torch.promote_types(x.dtype, dtype) == dtype
    return x.to(dtype).contiguous() if narrower else None


@functools.lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((), value, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=1024)
def _plan(design: DesignModel, dtype: torch.dtype, *shapes: tuple[int, ...] | None) -> _Plan | None:
    """The plan for q, k, v, mean, covariance and parameters of these shapes; None if they do not fit the design."""
    q, k, v, mean, covariance, *given = shapes
    if q is None or v is None or len(q) != 3 or k != q or len(v) != 3 or v[:2] != q[:2] or 0 in (*q, *v):
        return None
    (B, H, D), M, G = q, v[2], design.write.groups
    wanted = Belief.shapes(design, B, H, D, M)
    if M % G or design.transition.refuse_key_size(D) or mean != wanted[0] or covariance != (wanted[1] or None):
        return None
    strides = _strides(design, given, (B, H), {"D": D, "D/2": D // 2, "G": G, "M": M})
    compiled = native.library(SOURCE, dtype)
    if strides is None or compiled is None:
        return None
    function = compiled.step
    function.argtypes, function.restype = [ctypes.c_void_p] * 14 + [ctypes.c_int64], ctypes.c_int64
    sizes = _Sizes(
        heads=B * H,
        D=D,
        M=M,
        N=design.gain_groups(M),
        rule=_RULES.index(design.rule),
        diagonal=isinstance(design.covariance, Diagonal),
        rotates=isinstance(design.transition, DampedRotation),
        every=2 if design.transition == DampedRotation(noise="real") else 1,
        **strides,
    )
    return _Plan(function, ctypes.byref(sizes), B * H if B * H * design.state_size(D, M).total >= THREADS_FROM else 1)


def _strides(
    design: DesignModel, given: list[tuple[int, ...] | None], lead: tuple[int, int], sizes: dict[str, int]
) -> dict[str, int] | None:
    """How far apart heads and entries of each parameter lie, from its shape; None if a shape is not as asked for."""
    asked = {parameter.name: parameter for parameter in design.step_parameters}
    strides: dict[str, int] = {}
    for (name, short), shape in zip(_PARAMETERS.items(), given, strict=True):
        allowed: dict[tuple[int, ...] | None, tuple[int, int]] = {None: (0, 0)}
        if name in asked:
            axis = asked[name].last_axis
            allowed = {(): (0, 0), (*lead, sizes[axis]): (sizes[axis], 1)} if axis else {(): (0, 0), lead: (1, 0)}
            if asked[name].optional_axis:
                allowed[lead] = (1, 0)
        if shape not in allowed:
            return None
        strides[f"{short}_head"], strides[f"{short}_entry"] = allowed[shape]
    return strides
