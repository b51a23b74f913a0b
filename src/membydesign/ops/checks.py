"""Bad input is refused here, with the argument, what was expected and what came; good input becomes `Inputs`.

Shapes and types first (`check_inputs`, `check_belief`), then values (`check_values`), and after the filter has run what
it found (`check_found`). Values are not looked at while torch.compile traces, nor on the meta device, and on a GPU only
after the filter (`ops.one_look`).
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design import DesignModel, StepParameter, catalogue
from membydesign.errors import NonFiniteError, NotPositiveDefiniteError
from membydesign.ops.inputs import Inputs
from membydesign.ops.transforms import values

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_inputs(
    design: DesignModel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor | float | None],
    lead: str,
    state_dtype: torch.dtype | None = None,
) -> Inputs:
    """Check shapes and types against the design, and bring everything to the state's type.

    Args:
        design: what is needed, and in which shape.
        q: queries, with the axes of `lead` and then D.
        k: write keys, likewise.
        v: written values, with the axes of `lead` and then M.
        parameters: `process_noise`, `write_noise`, `prior_variance`, `log_decay` and `angle`, as the user gave them.
        lead: the leading axes: "B,T,H" for sequences, "B,H" for one step.
        state_dtype: the type that the user wants at least; None for that of the widest argument.
    """
    if not isinstance(design, DesignModel):
        name = design if isinstance(design, str) and design in catalogue else "bayesian_layer"
        _refuse("design", f"a DesignModel, such as catalogue[{name!r}]", repr(design))
    _check_sequences(design, q, k, v, lead)
    asked = {parameter.name: parameter for parameter in design.step_parameters}
    dtype = reduce(
        torch.promote_types,
        (p.dtype for p in parameters.values() if isinstance(p, Tensor) and p.is_floating_point()),
        torch.promote_types(q.dtype, torch.float32),
    )
    if state_dtype is not None:
        if state_dtype not in (torch.float32, torch.float64) or torch.promote_types(dtype, state_dtype) != state_dtype:
            _refuse("state_dtype", f"{'torch.float32 or ' * (dtype == torch.float32)}torch.float64", repr(state_dtype))
        dtype = state_dtype
    checked: dict[str, Tensor | None] = {}
    for name, value in parameters.items():
        if name in asked:
            checked[name] = _check_parameter(asked[name], value, q, v, design.write.groups, dtype, lead)
        elif value is None:
            checked[name] = None
        else:
            _refuse(name, f"None, since {_why_unused(design, name)}", _shown(value))
    write_noise = checked.pop("write_noise")
    assert write_noise is not None
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), write_noise=write_noise, **checked)


def check_belief(design: DesignModel, belief: Belief, name: str, batch: int, like: Tensor, M: int) -> None:
    """Check shapes and types of a belief for `batch` sequences, with heads and keys as in `like` ([..., H, D])."""
    if not isinstance(belief, Belief):
        _refuse(name, "a Belief (from filter_sequence or Belief.prior)", type(belief).__name__)
    H, D = like.shape[-2:]
    for part, given, wanted in zip(("mean", "covariance"), belief, Belief.shapes(design, batch, H, D, M), strict=True):
        where = f"{name}.{part}"
        if not wanted:
            if given is not None:
                _refuse(where, f"None, since {design.title} keeps no covariance", _shown(given))
            continue
        if not isinstance(given, Tensor):
            _refuse(where, f"a tensor of shape {list(wanted)} for {design.title}", _shown(given))
        if given.shape != wanted:
            _refuse(where, f"shape {list(wanted)} for {design.title}", f"shape {list(given.shape)}")
        if given.dtype not in (torch.float32, torch.float64):
            _refuse(where, "float32 or float64", str(given.dtype))
        _check_device(where, given, like.device)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> list[int]:
    """Check the boundaries of packed sequences and return them as numbers, [N+1]."""
    name = "cu_seqlens"
    if not isinstance(cu_seqlens, Tensor):
        _refuse(name, "a 1-D integer tensor of boundaries", _shown(cu_seqlens))
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        _refuse(name, "shape [N+1] for N packed sequences", f"shape {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        _refuse(name, "int32 or int64", str(cu_seqlens.dtype))
    if q.shape[0] != 1:
        _refuse(name, "B = 1, since packing puts all sequences into one row", f"B = {q.shape[0]}")
    if not torch.compiler.is_compiling() and values(cu_seqlens).ndim > 1:
        _refuse(name, "boundaries that all samples of torch.vmap share", "some for each sample")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[1]:
        _refuse(name, f"boundaries from 0 to T = {q.shape[1]}", f"from {bounds[0]} to {bounds[-1]}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            _refuse(name, "boundaries that never decrease", f"{start}, {end} at index {i}")
    return bounds


def check_values(design: DesignModel, inputs: Inputs) -> None:
    """Refuse NaNs, infinities, and variances or decays out of their bounds."""
    if _values_are_hidden(inputs.q):
        return
    bounds = {parameter.name: parameter.bound for parameter in design.step_parameters}
    for name, x in inputs._asdict().items():
        if x is None:
            continue
        smallest, largest = _range(name, x)
        bound = bounds.get(name)
        bad = {"> 0": smallest <= 0, ">= 0": smallest < 0, "<= 0": largest > 0}.get(bound or "", False)
        if bad:
            every = values(x)
            index = {"> 0": every <= 0, ">= 0": every < 0, "<= 0": every > 0}[str(bound)].nonzero()[0].tolist()
            what = f"variances {bound}"
            if name == "log_decay":
                what = "log-decays <= 0, for decays of at most one (a decay in (0, 1] is passed as its .log())"
            _refuse(name, what, f"{every[tuple(index)].item():.6g} at {_where(index, x)}")


def check_belief_values(belief: Belief, name: str, *, definite: bool) -> None:
    """Refuse NaNs and negative variances and, if `definite`, asymmetric or indefinite covariances."""
    P = belief.covariance
    if _values_are_hidden(belief.mean):
        return
    _range(f"{name}.mean", belief.mean)
    if P is None:
        return
    where = f"{name}.covariance"
    smallest, _ = _range(where, P)
    if P.ndim == belief.mean.ndim:
        if smallest < 0:
            _refuse(where, "variances of at least 0", f"{smallest:.3g}")
        return
    if not definite:
        return
    asymmetry, rounding, info = symmetry_and_sign(values(P))
    if asymmetry.item() > rounding:
        _refuse(where, "symmetric matrices", f"a relative asymmetry of {asymmetry.item():.3g}")
    failed = info.nonzero()
    if len(failed):
        *sample, b, h, g = failed[0].tolist()
        got = f"a negative eigenvalue at batch {b}, head {h}, group {g}, before position 0{_of_sample(sample)}"
        raise NotPositiveDefiniteError(f"{where}: expected positive semi-definite matrices, got {got}")


def symmetry_and_sign(P: Tensor) -> tuple[Tensor, float, Tensor]:
    """The largest relative asymmetry, how much of it rounding explains, and for each matrix 0 if it is not negative."""
    D = P.shape[-1]
    scale = P.diagonal(dim1=-2, dim2=-1).abs().amax(-1).clamp_min(torch.finfo(P.dtype).tiny)[..., None, None]
    rounding = 8 * max(D, 8) * torch.finfo(P.dtype).eps
    raised = P / scale + rounding * torch.eye(D, dtype=P.dtype, device=P.device)
    return ((P - P.mT).abs() / scale).max(), rounding, torch.linalg.cholesky_ex(raised).info


def precision_bound(dtype: torch.dtype) -> float:
    """The largest β r², rounded: 1/β is r² + kᵀP̄k."""
    return 1 + math.sqrt(torch.finfo(dtype).eps)


def check_found(precision: Tensor, inputs: Inputs, **results: Tensor | None) -> None:
    r"""Raise if a filter was not carried through: an innovation variance out of bounds, or a result that overflowed.

    Args:
        precision: β of every step, [B,T,H,G].
        inputs: what the filter was given.
        results: everything it found, by name.
    """
    if _values_are_hidden(precision):
        return
    _check_precision(precision.detach(), inputs.write_noise.detach())
    for name, x in results.items():
        if x is not None and not all(math.isfinite(value.item()) for value in torch.aminmax(values(x))):
            index = (~torch.isfinite(values(x))).nonzero()[0].tolist()
            hint = "scale the inputs down or use a wider type"
            raise NonFiniteError(f"{name} overflowed in {x.dtype} at index {index}: {hint}")


def _check_precision(precision: Tensor, noise: Tensor) -> None:
    """Raise if a β is not positive or, beyond rounding, above 1/r²: 1/β is r² + kᵀP̄k. One look says if to search."""
    bound = precision_bound(precision.dtype)
    every, ratio = values(precision), values(precision * noise)
    smallest, largest = (value.item() for value in torch.aminmax(every))
    if smallest > 0 and math.isfinite(largest) and ratio.max().item() <= bound:
        return
    noise = values(noise * torch.ones_like(precision))
    carried = torch.isfinite(every) & (every != 0)
    bad = ~(carried & (ratio <= bound) & (every > 0))
    if bool(bad.any()):
        index = min(bad.nonzero().tolist(), key=lambda i: i[-3])  # the earliest position
        where, at = _where(index, precision, last="group"), tuple(index)
        if not bool(carried[at]):
            raise NonFiniteError(
                f"the innovation precision overflowed in {precision.dtype} at {where}: it is {every[at].item()}. "
                "Scale keys or variances, or use float64."
            )
        raise NotPositiveDefiniteError(
            f"the covariance stopped being positive definite in {precision.dtype} at {where}: innovation variance "
            f"{1 / every[at].item():.3g} is below its write noise {noise[at].item():.3g}. "
            "Filter in float64, raise write_noise, or give process_noise > 0."
        )


def _values_are_hidden(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or x.is_meta


def _check_sequences(design: DesignModel, q: Tensor, k: Tensor, v: Tensor, lead: str) -> None:
    axes = lead.count(",") + 2
    for name, x in (("q", q), ("k", k), ("v", v)):
        letters = f"[{lead},{'M' if name == 'v' else 'D'}]"
        if not isinstance(x, Tensor):
            _refuse(name, f"a tensor {letters}", _shown(x))
        if x.ndim != axes:
            _refuse(name, f"shape {letters}", f"shape {list(x.shape)}")
        if not x.is_floating_point():
            _refuse(name, "a floating-point tensor", str(x.dtype))
        if x.numel() == 0:
            _refuse(name, "at least one element along every axis", f"shape {list(x.shape)}")
    if k.shape != q.shape:
        _refuse("k", f"the shape of q, {list(q.shape)}", f"shape {list(k.shape)}")
    if v.shape[:-1] != q.shape[:-1]:
        _refuse("v", f"shape [{', '.join(map(str, q.shape[:-1]))}, M] to go with q", f"shape {list(v.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            _refuse(name, f"the dtype of q, {q.dtype}", str(x.dtype))
        _check_device(name, x, q.device)
    D, M, G = q.shape[-1], v.shape[-1], design.write.groups
    reason = design.transition.refuse_key_size(D)
    if reason:
        _refuse("q", reason, f"D = {D}")
    if M % G:
        _refuse("v", f"M divisible by the design's {G} noise groups", f"M = {M}")


def _check_parameter(
    parameter: StepParameter,
    value: Tensor | float | None,
    q: Tensor,
    v: Tensor,
    groups: int,
    dtype: torch.dtype,
    lead: str,
) -> Tensor:
    name, axis = parameter.name, parameter.last_axis
    sizes = {"D": q.shape[-1], "D/2": q.shape[-1] // 2, "G": groups, "M": v.shape[-1]}
    leading = list(q.shape[:-1])
    full = [*leading, sizes[axis]] if axis else leading
    shapes = f"{leading} or {full}" if parameter.optional_axis else f"{full}"
    wanted = f"a number or a tensor {parameter.shape.replace('B,T,H', lead)} = {shapes}"
    if value is None:
        _refuse(name, f"{wanted} ({parameter.symbol}), which this design needs", "None")
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        _refuse(name, wanted, _shown(value))
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            _refuse(name, "a floating-point tensor", str(value.dtype))
        _check_device(name, value, q.device)
        shared = parameter.optional_axis and list(value.shape) == leading
        if value.ndim and list(value.shape) != full and not shared:
            _refuse(name, wanted, f"shape {list(value.shape)}")
        tensor = (value[..., None] if shared else value).to(dtype).expand(full)
    else:
        tensor = torch.full(full, float(value), dtype=dtype, device=q.device)
    one_gain_for_all_columns = not axis and name in ("write_noise", "prior_variance")
    return tensor[..., None] if one_gain_for_all_columns else tensor


def _range(name: str, x: Tensor) -> tuple[float, float]:
    """The smallest and the largest value, in one pass; refuses NaNs and infinities."""
    every = values(x)
    smallest, largest = (value.item() for value in torch.aminmax(every))
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        index = (~torch.isfinite(every)).nonzero()[0].tolist()
        where = f"index {index}" if "." in name else _where(index, x)
        _refuse(name, "finite values", f"{every[tuple(index)].item()} at {where}")
    return smallest, largest


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        _refuse(name, f"a tensor on the device of q, {device}", f"one on {x.device}")


def _why_unused(design: DesignModel, name: str) -> str:
    if name in ("log_decay", "angle"):
        return f"the transition {type(design.transition).__name__} has no {name}"
    if name == "process_noise" and design.rule == "additive":
        return "the LatentInput model has no process noise"
    if name == "process_noise":
        return f"{design.title} resets the predicted covariance that it would enter"
    return f"{design.title} starts from the prior of its covariance, {design.covariance!r}"


def _where(index: list[int], x: Tensor, last: str = "entry") -> str:
    """An index of the values of x, [B,T,H] or [B,T,H,·], in words."""
    mapped = len(index) - x.ndim
    names = zip(("batch", "position", "head", last), index[mapped:], strict=False)
    return ", ".join(f"{axis} {i}" for axis, i in names) + _of_sample(index[:mapped])


def _of_sample(index: list[int]) -> str:
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


def _refuse(argument: str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")
