"""Checks of arguments and results: errors name the argument, what was expected and what was given.

Shapes and types come first (`check_inputs`, `check_state`), then values (`check_values`), and after the filter its
results (`check_results`). Values are not read while torch.compile traces, nor on the meta device, and on a GPU only
after the filter (`device_checks.py`).
"""

from __future__ import annotations

import functools
import math
from functools import reduce
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from membydesign.design import Design, StepParameter, catalogue
from membydesign.errors import did_you_mean
from membydesign.filter import readable
from membydesign.filter.inputs import Inputs
from membydesign.filter.transforms import hidden, values
from membydesign.state import Sizes, map_state, named_tensors

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def check_inputs(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor | float | None],
    lead: str,
    state_dtype: torch.dtype | None = None,
    state: object = None,
) -> Inputs:
    """Check shapes and types against the design's schema, and bring everything to the state's type.

    Args:
        design: what is needed, and in which shape.
        q: queries, with the axes of `lead` and then D.
        k: write keys, likewise.
        v: written values, with the axes of `lead` and then M.
        parameters: step parameters by name, as the user passed them.
        lead: the leading axes: "B,T,H" for sequences, "B,H" for one step.
        state_dtype: the smallest type that the user accepts; None for that of the widest argument.
        state: the state to start from, not yet checked: numbers among the parameters become as exact as it is.
    """
    check_design(design)
    check_sequences(design, q, k, v, lead)
    schema = {parameter.name: parameter for parameter in design.step_parameters}
    _check_names(design, schema, parameters, q, v, lead)
    dtype = reduce(
        torch.promote_types,
        (p.dtype for p in parameters.values() if isinstance(p, Tensor) and p.is_floating_point()),
        torch.promote_types(q.dtype, torch.float32),
    )
    if state_dtype is not None:
        if state_dtype not in (torch.float32, torch.float64) or torch.promote_types(dtype, state_dtype) != state_dtype:
            refuse("state_dtype", f"{'torch.float32 or ' * (dtype == torch.float32)}torch.float64", repr(state_dtype))
        dtype = state_dtype
    parts = (x.dtype for _, x in named_tensors(state)) if isinstance(state, tuple) else ()
    dtype = reduce(torch.promote_types, (part for part in parts if part.is_floating_point), dtype)
    checked = {
        name: _check_parameter(design, parameter, parameters[name], q, v, dtype, lead)
        for name, parameter in schema.items()
    }
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), checked)


def check_design(design: object) -> None:
    """Refuse what is not a design."""
    if not isinstance(design, Design):
        name = design if isinstance(design, str) and design in catalogue else "bayesian_layer"
        refuse("design", f"a Design, such as catalogue[{name!r}]", repr(design))


def _check_names(
    design: Design,
    schema: Mapping[str, StepParameter],
    parameters: Mapping[str, Tensor | float | None],
    q: Tensor,
    v: Tensor,
    lead: str,
) -> None:
    """Refuse missing and unexpected step parameters, with all that the design needs."""
    missing = [name for name in schema if parameters.get(name) is None]
    unexpected = [name for name, value in parameters.items() if name not in schema and value is not None]
    if missing:
        needs = "; ".join(
            f"{name} ({schema[name].symbol}): {_expected(design, schema[name], q, v, lead)}" for name in missing
        )
        also = f"; got {', '.join(unexpected)}, which it does not have" if unexpected else ""
        refuse(missing[0], f"a value for {design.title}, which needs {needs}", f"None{also}")
    if unexpected:
        name = unexpected[0]
        has = ", ".join(schema) or "no step parameters"
        near = did_you_mean(name, schema)
        refuse(name, f"None, since {design.title} has {has}", f"{_shown(parameters[name])}{near}")


@functools.lru_cache(maxsize=256)
def _state_form(design: Design, sizes: Sizes) -> Any:
    return design.prior(sizes, dtype=torch.float32, device="meta")


def state_form(design: Design, sizes: Sizes) -> Any:
    """A state of the design's own form without values: which parts there are, and their shapes."""
    if torch.compiler.is_compiling():
        return design.prior(sizes, dtype=torch.float32, device="meta")
    return _state_form(design, sizes)


def check_state(design: Design, state: object, name: str, batch: int, like: Tensor, M: int) -> Any:
    """Check shapes and types of a state for `batch` sequences, with heads and keys as in `like` ([..., H, D]).

    Returns:
        The state, in the design's own class.
    """
    H, D = like.shape[-2:]
    form = state_form(design, Sizes(batch, H, D, M))
    kind = type(form)
    if not isinstance(state, tuple) or getattr(state, "_fields", None) != kind._fields:
        refuse(name, f"a {kind.__name__} (from filter_sequence or {kind.__name__}.prior)", type(state).__name__)
    _check_parts(design, state, form, name, like.device)
    return _in_form(state, form)


def _in_form(state: Any, form: Any) -> Any:
    """The state in the classes of its form: a saved one may have others with the same fields."""
    if not isinstance(form, tuple):
        return state
    parts = [_in_form(part, part_form) for part, part_form in zip(state, form, strict=True)]
    return tuple(parts) if type(form) is tuple else type(form)(*parts)


def _check_parts(design: Design, state: Any, form: Any, where: str, device: torch.device) -> None:
    if form is None:
        if state is not None:
            refuse(where, f"None, since {design.title} keeps no {where.rpartition('.')[2]}", _shown(state))
    elif isinstance(form, Tensor):
        if not isinstance(state, Tensor):
            refuse(where, f"a tensor of shape {list(form.shape)} for {design.title}", _shown(state))
        if state.shape != form.shape:
            refuse(where, f"shape {list(form.shape)} for {design.title}", f"shape {list(state.shape)}")
        if state.dtype not in (torch.float32, torch.float64):
            refuse(where, "float32 or float64", str(state.dtype))
        _check_device(where, state, device)
        _check_memory(where, state)
    else:
        if not isinstance(state, tuple) or len(state) != len(form):
            refuse(where, f"a {type(form).__name__}", _shown(state))
        names = getattr(form, "_fields", range(len(form)))
        for part_name, part, part_form in zip(names, state, form, strict=True):
            _check_parts(design, part, part_form, f"{where}.{part_name}", device)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> list[int]:
    """Check the boundaries of packed sequences and return them as numbers, [N+1]."""
    name = "cu_seqlens"
    if not isinstance(cu_seqlens, Tensor):
        refuse(name, "a 1-D integer tensor of boundaries", _shown(cu_seqlens))
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        refuse(name, "shape [N+1] for N packed sequences", f"shape {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        refuse(name, "int32 or int64", str(cu_seqlens.dtype))
    if q.shape[0] != 1:
        refuse(name, "B = 1, since packing puts all sequences into one row", f"B = {q.shape[0]}")
    _check_memory(name, cu_seqlens)
    if not torch.compiler.is_compiling() and values(cu_seqlens).ndim > 1:
        refuse(name, "boundaries that all samples of torch.vmap share", "some for each sample")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[1]:
        refuse(name, f"boundaries from 0 to T = {q.shape[1]}", f"from {bounds[0]} to {bounds[-1]}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            refuse(name, "boundaries that never decrease", f"{start}, {end} at index {i}")
    return bounds


def bounds_of(design: Design) -> dict[str, str]:
    """The bound of every argument of the filter that has one, by name."""
    bounds = {parameter.name: parameter.bound for parameter in design.step_parameters}
    return {**bounds, "q": design.key_bound, "k": design.key_bound, "v": design.value_bound}


def out_of_bounds(x: Tensor, bound: str) -> Tensor:
    """Which entries violate a bound."""
    match bound:
        case "> 0":
            return x <= 0
        case ">= 0":
            return x < 0
        case "<= 0":
            return x > 0
        case "[0, 1]":
            return (x < 0) | (x > 1)
        case _:
            return torch.zeros_like(x, dtype=torch.bool)


def check_values(
    design: Design, inputs: Inputs, *, only: Container[str] | None = None, skip: Container[str] = ()
) -> None:
    """Refuse NaNs, infinities, and numbers out of their bounds, in all arguments or those that are named."""
    if hidden(inputs.q):
        return
    bounds = bounds_of(design)
    for name, x in inputs.named().items():
        if name in skip or (only is not None and name not in only):
            continue
        bound = bounds[name]
        if bound == "finite" and all_finite(x):
            continue
        smallest, largest = _range(name, x)
        within = {
            "> 0": smallest > 0,
            ">= 0": smallest >= 0,
            "<= 0": largest <= 0,
            "[0, 1]": smallest >= 0 and largest <= 1,
        }
        if not within.get(bound, True):
            every = values(x)
            index = out_of_bounds(every, bound).nonzero()[0].tolist()
            kind = "variances" if name.endswith(("noise", "variance")) else "values"
            expected = f"{kind} in [0, 1]" if bound == "[0, 1]" else f"{kind} {bound}"
            if name == "log_decay":
                expected = "log-decays <= 0, for decays of at most one (a decay in (0, 1] is passed as its .log())"
            refuse(name, expected, f"{every[tuple(index)].item():.6g} at {where_at(index, x)}")


def check_state_values(design: Design, state: tuple, name: str, *, thorough: bool) -> None:
    """Refuse NaNs and what the design calls a flaw; factorisations only if `thorough`."""
    tensors = dict(named_tensors(state, name))
    if any(hidden(x) for x in tensors.values()):
        return
    for where, x in tensors.items():
        if not all_finite(x):
            _range(where, x)
    for flaw in design.state_flaws(map_state(values, state), thorough=thorough):
        if bool(flaw.where.any()):
            index = flaw.where.nonzero()[0].tolist()
            raise flaw.error(f"{name}.{flaw.part}: expected {flaw.expected}, got {flaw.got(index)}")


def _check_memory(name: str, x: Tensor) -> None:
    """Refuse what even torch cannot read."""
    flaw = None if torch.compiler.is_compiling() else readable.flaw(x)
    if flaw is not None:
        refuse(name, *flaw)


def check_sequences(design: Design, q: Tensor, k: Tensor, v: Tensor, lead: str) -> None:
    """Check shapes and types of q, k and v; `check_inputs` explains the arguments."""
    axes = lead.count(",") + 2
    for name, x in (("q", q), ("k", k), ("v", v)):
        letters = f"[{lead},{'M' if name == 'v' else 'D'}]"
        if not isinstance(x, Tensor):
            refuse(name, f"a tensor {letters}", _shown(x))
        if x.ndim != axes:
            refuse(name, f"shape {letters}", f"shape {list(x.shape)}")
        if not x.is_floating_point():
            refuse(name, "a floating-point tensor", str(x.dtype))
        if x.numel() == 0:
            refuse(name, "at least one element along every axis", f"shape {list(x.shape)}")
        _check_memory(name, x)
    if k.shape != q.shape:
        refuse("k", f"the shape of q, {list(q.shape)}", f"shape {list(k.shape)}")
    if v.shape[:-1] != q.shape[:-1]:
        refuse("v", f"shape [{', '.join(map(str, q.shape[:-1]))}, M] to go with q", f"shape {list(v.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            refuse(name, f"the dtype of q, {q.dtype}", str(x.dtype))
        _check_device(name, x, q.device)
    D, M = q.shape[-1], v.shape[-1]
    reason = design.refuse_key_size(D)
    if reason:
        refuse("q", reason, f"D = {D}")
    reason = design.refuse_value_size(M)
    if reason:
        refuse("v", reason, f"M = {M}")


def _expected(design: Design, parameter: StepParameter, q: Tensor, v: Tensor, lead: str) -> str:
    """What a step parameter may be, in words."""
    leading = list(q.shape[:-1])
    full = [*leading, *parameter.sizes(q.shape[-1], v.shape[-1], design.groups)]
    shapes = f"{leading} or {full}" if parameter.optional_axes else f"{full}"
    return f"a number or a tensor {parameter.shape.replace('B,T,H', lead)} = {shapes}"


def _check_parameter(
    design: Design,
    parameter: StepParameter,
    value: Tensor | float | None,
    q: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    lead: str,
) -> Tensor:
    name, leading = parameter.name, list(q.shape[:-1])
    full = [*leading, *parameter.sizes(q.shape[-1], v.shape[-1], design.groups)]
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        refuse(name, _expected(design, parameter, q, v, lead), _shown(value))
    if not isinstance(value, Tensor):
        return torch.full(full, float(value), dtype=dtype, device=q.device)
    if not value.is_floating_point():
        refuse(name, "a floating-point tensor", str(value.dtype))
    _check_device(name, value, q.device)
    _check_memory(name, value)
    shared = parameter.optional_axes and list(value.shape) == leading
    if value.ndim and list(value.shape) != full and not shared:
        refuse(name, _expected(design, parameter, q, v, lead), f"shape {list(value.shape)}")
    if shared:
        value = value[(..., *[None] * len(parameter.axes))]
    return value.to(dtype).expand(full)


def all_finite(x: Tensor) -> bool:
    """Whether x has neither NaNs nor infinities. A finite sum proves it, in half the time of looking at every entry."""
    every = values(x)
    return math.isfinite(every.sum().item()) or bool(torch.isfinite(every).all())


def _range(name: str, x: Tensor) -> tuple[float, float]:
    """The smallest and the largest value, in one pass; refuses NaNs and infinities."""
    every = values(x)
    smallest, largest = (value.item() for value in torch.aminmax(every))
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        index = (~torch.isfinite(every)).nonzero()[0].tolist()
        where = f"index {index}" if "." in name else where_at(index, x)
        refuse(name, "finite values", f"{every[tuple(index)].item()} at {where}")
    return smallest, largest


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(name, f"a tensor on the device of q, {device}", f"one on {x.device}")


def where_at(index: list[int], x: Tensor, last: str = "entry") -> str:
    """An index of the values of x, [B,T,H] or [B,T,H,·], in words."""
    mapped = len(index) - x.ndim
    names = zip(("batch", "position", "head", last), index[mapped:], strict=False)
    return ", ".join(f"{axis} {i}" for axis, i in names) + of_sample(index[:mapped])


def of_sample(index: list[int]) -> str:
    """Which sample of torch.vmap it is, to follow where it is."""
    return f", sample {', '.join(map(str, index))} of torch.vmap" if index else ""


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if value is None or isinstance(value, (str, bool, int, float)):
        return f"{value!r} ({type(value).__name__})" if value is not None else "None"
    shape = getattr(value, "shape", None)
    kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    return (
        kind if shape is None else f"{kind} of shape {list(shape)} (torch.from_numpy makes a tensor of a NumPy array)"
    )


def refuse(argument: str, expected: str, got: str) -> NoReturn:
    """Raise the error for a bad argument."""
    raise ValueError(f"{argument}: expected {expected}, got {got}")
