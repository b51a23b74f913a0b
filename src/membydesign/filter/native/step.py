"""A decoding step in native code (`csrc/step.c`): every rule and transition that we have, on a CPU, without a gradient.

`filter_step` tries it first. It declines where it does not apply, and where an argument or a result is wrong; the slow
path then runs and raises the detailed error. Checks here are therefore minimal. Shapes are checked once for all steps
that have them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from membydesign import design as designs
from membydesign.belief import Belief, ScaledBelief
from membydesign.design import (
    Block,
    DampedRotation,
    DecayAndRemoval,
    Dense,
    DesignModel,
    Diagonal,
    DiagonalDecay,
    Discounted,
    Identity,
    LatentInput,
    MeanOnly,
    ObserveMemory,
    PartialReset,
    PerColumnReset,
    Reset,
    ScalarDecay,
    Stationary,
    Transition,
)
from membydesign.filter import readable, transforms
from membydesign.filter.checks import state_form
from membydesign.filter.native import build as native
from membydesign.filter.native import structs
from membydesign.filter.result_checks import precision_bound
from membydesign.state import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from membydesign.design import Design, UnknownScale

NAME, SOURCE = "native, one token", "step.c"
THREADS_FROM = 1 << 16
"""Elements of all beliefs from which on it pays to wake threads."""

_RULES = {
    (ObserveMemory, Dense): "KALMAN",
    (ObserveMemory, Diagonal): "KALMAN",
    (ObserveMemory, Block): "KALMAN",
    (ObserveMemory, PartialReset): "KALMAN",
    (ObserveMemory, Discounted): "KALMAN",
    (ObserveMemory, Reset): "DELTA",
    (ObserveMemory, PerColumnReset): "DELTA",
    (LatentInput, Dense): "ADDITIVE",
    (LatentInput, MeanOnly): "ADDITIVE",
}
"""What each write does to each covariance: a case of `enum Rule` in step.c."""
_TRANSITIONS = (Identity, ScalarDecay, DiagonalDecay, DampedRotation, DecayAndRemoval)
_PARAMETERS = {
    "process_noise": "l2",
    "stationary_variance": "l2",
    "write_noise": "r2",
    "prior_variance": "lambda",
    "log_decay": "log_a",
    "angle": "angle",
    "removal_key": "removal_key",
    "removal": "removal",
    "retention": "gamma",
    "log_discount": "log_delta",
}
"""The names of `filter_step` and of step.c."""


class _Plan(NamedTuple):
    """What to call for tensors of these shapes, on how many heads, and on how many threads at most."""

    call: Callable[..., int]
    sizes: bytes
    pack: Callable[[Sequence[int]], bytes]
    heads: int
    threads: int


def native_step(
    design: Design,
    belief: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor | float | None],
) -> tuple[Tensor, Any] | None:
    """The read-out [B,H,M] and the new belief, or None; arguments as the user of `filter_step` gave them."""
    if isinstance(design, designs.UnknownScale):
        return _scaled_step(design, belief, q, k, v, parameters)
    result = _step(design, belief, q, k, v, parameters)
    return None if result is None else result[:2]


def _scaled_step(
    design: UnknownScale, belief: Any, q: Tensor, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor | float | None]
) -> tuple[Tensor, Any] | None:
    """A step of the base, and what its errors say about the scale."""
    if not isinstance(belief, ScaledBelief) or not isinstance(v, Tensor):
        return None
    of_base = dict(parameters)
    given = [belief.shape, belief.rate, *([of_base.pop("discount", None)] if design.discount else [])]
    result = _step(design.base, belief.base, q, k, v, of_base, squares=True)
    if result is None:
        return None
    output, base, squares = result
    scale = [None if x is None else _ready(x, squares.dtype) for x in given]
    if any(x is None for x in scale):
        return None
    shape, rate, *discount = (x for x in scale if x is not None)
    if shape.shape != squares.shape or rate.shape != squares.shape or shape.dtype != squares.dtype:
        return None
    sound = (shape > 1) & (rate > 0)
    if discount:
        kept = discount[0]
        if kept.shape not in ((), squares.shape[:2]):
            return None
        kept = kept[..., None]
        sound &= (kept >= 0) & (kept <= 1)
        shape, rate = kept * shape, kept * rate
    shape, rate = shape + v.shape[-1] // squares.shape[-1] / 2, rate + squares / 2
    sound &= rate.isfinite() & shape.isfinite()
    return (output, ScaledBelief(base, shape, rate)) if bool(sound.all()) else None


def _step(
    design: Design,
    belief: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor | float | None],
    *,
    squares: bool = False,
) -> tuple[Tensor, Any, Any] | None:
    """The read-out, the new belief, and β‖v − M̄ᵀk‖² [B,H,G] if `squares`; or None."""
    if torch.compiler.is_compiling() or transforms.followed() or not isinstance(belief, Belief):
        return None
    dtype = belief.mean.dtype if isinstance(belief.mean, Tensor) else None
    if dtype not in native.REALS:
        return None
    kept = belief if belief.covariance is not None else belief[:1]
    ready: list[Tensor] = []
    try:
        for x in (q, k, v, *kept, *parameters.values()):
            # What the layers pass; anything else takes a closer look.
            if (
                type(x) is not Tensor
                or x.dtype is not dtype
                or x.requires_grad
                or not x.is_cpu
                or x.is_neg()
                or not x.is_contiguous()
            ):
                x = _ready(x, dtype)
                if x is None:
                    return None
            ready.append(x)
    except RuntimeError:  # a tensor without strides or storage
        return None
    plan = _plan(design, dtype, len(kept), squares, tuple(parameters), *[x.shape for x in ready])
    if plan is None or q.dtype != k.dtype or q.dtype != v.dtype or kept[-1].dtype != dtype:
        return None
    output, *beliefs = [torch.empty_like(x) for x in ready[2 : 3 + len(kept)]]
    counted = [ready[4].new_empty(ready[4].shape[:3])] if squares else []
    try:
        pointers = [x.data_ptr() for x in (*ready, *beliefs, output, *counted)]
    except RuntimeError:
        return None
    if min(pointers) < readable.LOWEST:  # perhaps one without memory: the slow path finds out
        return None
    threads = plan.threads if plan.threads == 1 else min(plan.threads, torch.get_num_threads())
    flawed = plan.call(plan.sizes, plan.pack(pointers), plan.heads, threads)
    if flawed:
        if flawed < 0:
            raise structs.out_of_memory(SOURCE, -flawed)
        return None
    if q.dtype != dtype:
        output = output.to(q.dtype)
        if not output.isfinite().all():
            return None
    return output, type(belief)(*beliefs), counted[0] if squares else None


def why_not(design: Design) -> str | None:
    """Why step.c has no decoding step for a design; None if it has."""
    if isinstance(design, designs.UnknownScale):
        return why_not(design.base)
    if not isinstance(design, DesignModel):
        return f"for {design.title}, since step.c runs linear-Gaussian designs"
    transition = _drift(design)
    if type(transition) not in _TRANSITIONS:
        return f"for {type(transition).__name__}, since step.c does not have this transition"
    if (type(design.write), type(design.covariance)) not in _RULES:
        return f"for {design.title}, since step.c does not have this write and covariance"
    if isinstance(transition, DecayAndRemoval) and design.keeps_covariance:
        return f"for {design.title}, since step.c does not move a covariance by this transition"
    return None


def _drift(design: DesignModel) -> Transition:
    """The transition, of stationary noise the one inside."""
    return design.transition.drift if isinstance(design.transition, Stationary) else design.transition


def _ready(x: Tensor | float | None, dtype: torch.dtype) -> Tensor | None:
    """A plain tensor that native code can read, in the type of the belief; None of what has a gradient or is wider."""
    if type(x) is float or type(x) is int:
        return _number(float(x), dtype)
    if (type(x) is not Tensor and type(x) is not Parameter) or not x.is_cpu:
        return None
    if x.requires_grad and torch.is_grad_enabled():
        return None
    if x.is_neg():
        return None
    if x.dtype == dtype and x.is_contiguous():
        return x  # whether it has memory, its address will say
    if x.data_ptr() < readable.LOWEST:
        return None
    if x.dtype == dtype:
        return x.contiguous()
    narrower = x.is_floating_point() and torch.promote_types(x.dtype, dtype) == dtype
    return x.to(dtype).contiguous() if narrower else None


@functools.lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((), value, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=1024)
def _plan(
    design: Design, dtype: torch.dtype, kept: int, squares: bool, names: tuple[str, ...], *shapes: tuple[int, ...]
) -> _Plan | None:
    """The plan for q, k, v, a belief of `kept` parts and the named parameters; None if step.c cannot run them."""
    if not isinstance(design, DesignModel) or why_not(design) is not None or not set(names) <= set(_PARAMETERS):
        return None
    (q, k, v, *belief), inputs = shapes[: 3 + kept], dict(zip(names, shapes[3 + kept :], strict=True))
    if len(q) != 3 or k != q or len(v) != 3 or v[:2] != q[:2] or 0 in (*q, *v):
        return None
    (B, H, D), M, G = q, v[2], design.groups
    if design.refuse_value_size(M) or design.refuse_key_size(D):
        return None
    form = state_form(design, Sizes(B, H, D, M))
    if belief != [part.shape for part in form if part is not None]:
        return None
    strides = _strides(design, inputs, (B, H), (D, M, G))
    rows = belief[1][-1] if kept > 1 else D
    if rows % 2 and rows < D and isinstance(_drift(design), DampedRotation):
        return None  # pairs of rows that belong to two blocks
    if strides is None or not native.available(SOURCE, dtype):
        return None
    step = structs.function(SOURCE, dtype, "step", ("Sizes", "Tensors"))
    sizes = {
        "D": D,
        "M": M,
        "N": design.gain_groups(M),
        "rule": structs.cases(SOURCE, dtype, "Rule")[_RULES[type(design.write), type(design.covariance)]],
        "diagonal": isinstance(design.covariance, Diagonal),
        "rows": rows,
        "rotates": isinstance(_drift(design), DampedRotation),
        "every": 2 if design.transition == DampedRotation(noise="real") else 1,
        "bound": precision_bound(dtype),
        "stationary": isinstance(design.transition, Stationary),
        **strides,
    }
    sizes_struct, tensors_struct = step.structs
    packed_sizes, _ = sizes_struct.fill(sizes)
    own = ("from_M", "from_P")[:kept], ("M", "P")[:kept]
    extra = ("squares",) if squares else ()
    parts = ("q", "k", "v", *own[0], *(_PARAMETERS[name] for name in names), *own[1], "o", *extra)
    pack = tensors_struct.packer(parts)
    threads = B * H if B * H * design.state_size(D, M).total >= THREADS_FROM else 1
    return _Plan(step.call, packed_sizes, pack, B * H, threads)


def _strides(
    design: DesignModel, inputs: dict[str, tuple[int, ...]], lead: tuple[int, int], sizes: tuple[int, int, int]
) -> dict[str, int] | None:
    """How far apart heads and entries of each parameter lie, from its shape; None if a shape is not as asked for."""
    schema = {parameter.name: parameter for parameter in design.step_parameters}
    strides = {f"{short}_{part}": 0 for short in _PARAMETERS.values() for part in ("head", "entry")}
    for name, short in _PARAMETERS.items():
        if name not in schema:
            if name in inputs:
                return None
            continue
        size = schema[name].sizes(*sizes)
        allowed = {(): (0, 0), (*lead, *size): (size[0], int(size[0] > 1)) if size else (1, 0)}
        if schema[name].optional_axes:
            allowed[lead] = (1, 0)
        if inputs.get(name) not in allowed:
            return None
        strides[f"{short}_head"], strides[f"{short}_entry"] = allowed[inputs[name]]
    return strides
