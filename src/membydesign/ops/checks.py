"""Bad input is refused here, with the argument, what was expected and what came; good input becomes `Inputs`."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design import DesignModel, StepParameter
from membydesign.errors import NonFiniteError, NotPositiveDefiniteError
from membydesign.ops.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Mapping

_AXES = ("batch", "position", "head")


def check_inputs(
    design: DesignModel, q: Tensor, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor | float | None]
) -> Inputs:
    """Check q, k, v and the step parameters against the design, and bring them to the state's type.

    Args:
        design: what is needed, and in which shape.
        q: [B,T,H,D].
        k: [B,T,H,D].
        v: [B,T,H,M].
        parameters: `process_noise`, `write_noise`, `prior_variance`, `log_decay` and `angle`, as the user gave them.
    """
    if not isinstance(design, DesignModel):
        _refuse("design", "a DesignModel, such as catalogue['bayesian_layer']", repr(design))
    sizes = _check_sequences(design, q, k, v)
    asked = {parameter.name: parameter for parameter in design.step_parameters}
    dtype = reduce(
        torch.promote_types,
        (p.dtype for p in parameters.values() if isinstance(p, Tensor) and p.is_floating_point()),
        torch.promote_types(q.dtype, torch.float32),
    )
    checked: dict[str, Tensor | None] = {}
    for name, value in parameters.items():
        if name in asked:
            checked[name] = _check_parameter(asked[name], value, sizes, q.device, dtype)
        elif value is None:
            checked[name] = None
        else:
            _refuse(name, f"None, since {_why_unused(design, name)}", _shown(value))
    write_noise = checked.pop("write_noise")
    assert write_noise is not None
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), write_noise=write_noise, **checked)


def check_belief(design: DesignModel, belief: Belief, name: str, batch: int, like: Tensor, M: int) -> Belief:
    """Check a belief that the user gave for `batch` sequences with heads and keys as in `like` ([B,T,H,D])."""
    if not isinstance(belief, Belief):
        _refuse(name, "a Belief (from filter_sequence or Belief.prior)", type(belief).__name__)
    H, D = like.shape[-2:]
    expected = Belief.prior(design, batch, H, D, M, device="meta")
    for part in ("mean", "covariance"):
        given, wanted = getattr(belief, part), getattr(expected, part)
        where = f"{name}.{part}"
        if wanted is None:
            if given is not None:
                _refuse(where, f"None, since {design.title} keeps no covariance", _shown(given))
            continue
        if not isinstance(given, Tensor):
            _refuse(where, f"a tensor of shape {list(wanted.shape)} for {design.title}", _shown(given))
        if given.shape != wanted.shape:
            _refuse(where, f"shape {list(wanted.shape)} for {design.title}", f"shape {list(given.shape)}")
        if given.dtype not in (torch.float32, torch.float64):
            _refuse(where, "float32 or float64", str(given.dtype))
        _check_device(where, given, like.device)
        _check_finite(where, given)
    return belief


def check_positive_definite(belief: Belief, name: str) -> None:
    """Refuse a given covariance that is not symmetric, or not positive semi-definite beyond rounding."""
    P = belief.covariance
    if P is None:
        return
    if P.ndim == belief.mean.ndim:
        if bool((P < 0).any()):
            _refuse(f"{name}.covariance", "variances of at least 0", f"{P.min().item():.3g}")
        return
    P = P.detach()
    scale = P.diagonal(dim1=-2, dim2=-1).abs().amax(-1).clamp_min(torch.finfo(P.dtype).tiny)[..., None, None]
    rounding = math.sqrt(torch.finfo(P.dtype).eps)
    asymmetry = ((P - P.mT).abs() / scale).max().item()
    if asymmetry > rounding:
        _refuse(f"{name}.covariance", "symmetric matrices", f"a relative asymmetry of {asymmetry:.3g}")
    identity = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    failed = torch.linalg.cholesky_ex(P / scale + rounding * identity).info.nonzero()
    if len(failed):
        where = dict(zip(("batch", "head", "group"), failed[0].tolist(), strict=True))
        _refuse(
            f"{name}.covariance",
            "positive semi-definite matrices",
            "a negative eigenvalue at " + ", ".join(f"{axis} {i}" for axis, i in where.items()),
        )


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
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[1]:
        _refuse(name, f"boundaries from 0 to T = {q.shape[1]}", f"from {bounds[0]} to {bounds[-1]}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            _refuse(name, "strictly increasing boundaries", f"{start}, {end} at index {i}")
    return bounds


def check_precision(precision: Tensor, inputs: Inputs) -> None:
    r"""Raise if an innovation variance $1/\beta$ came out below the write noise it contains.

    Args:
        precision: β of every step, [B,T,H,G].
        inputs: what the filter was given.
    """
    variance, floor = 1 / precision.detach(), inputs.write_noise.detach()
    rounding = math.sqrt(torch.finfo(precision.dtype).eps)
    bad = (~(variance >= floor * (1 - rounding))).nonzero()
    if len(bad):
        b, t, h, g = first = min(bad.tolist(), key=lambda index: index[1])
        noise = floor.expand_as(variance)[tuple(first)].item()
        raise NotPositiveDefiniteError(
            f"the covariance stopped being positive definite in {precision.dtype} at batch {b}, head {h}, group {g}, "
            f"position {t}: innovation variance {variance[tuple(first)].item():.3g} is below its write noise "
            f"{noise:.3g}. Filter in float64, raise write_noise, or give process_noise > 0."
        )


def check_finite_result(name: str, value: Tensor) -> None:
    """Raise if a result overflowed: finite inputs must not give an infinity or a NaN."""
    bad = _first_non_finite(value)
    if bad is not None:
        raise NonFiniteError(f"{name} overflowed in {value.dtype} at index {bad}: scale the inputs down or use float64")


def _check_sequences(design: DesignModel, q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        letters = "[B,T,H,M]" if name == "v" else "[B,T,H,D]"
        if not isinstance(x, Tensor):
            _refuse(name, f"a tensor {letters}", _shown(x))
        if x.ndim != 4:
            _refuse(name, f"shape {letters}", f"shape {list(x.shape)}")
        if not x.is_floating_point():
            _refuse(name, "a floating-point tensor", str(x.dtype))
        if x.numel() == 0:
            _refuse(name, "at least one element along every axis", f"shape {list(x.shape)}")
    if k.shape != q.shape:
        _refuse("k", f"the shape of q, {list(q.shape)}", f"shape {list(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        _refuse("v", f"shape [{', '.join(map(str, q.shape[:3]))}, M] to go with q", f"shape {list(v.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            _refuse(name, f"the dtype of q, {q.dtype}", str(x.dtype))
        _check_device(name, x, q.device)
    B, T, H, D = q.shape
    M, G = v.shape[-1], design.write.groups
    reason = design.transition.refuse_key_size(D)
    if reason:
        _refuse("q", reason, f"shape {list(q.shape)}")
    if M % G:
        _refuse("v", f"M divisible by the design's {G} noise groups", f"M = {M}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_finite(name, x)
    return {"B": B, "T": T, "H": H, "D": D, "D/2": D // 2, "G": G, "M": M, "": 0}


def _check_parameter(
    parameter: StepParameter,
    value: Tensor | float | None,
    sizes: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    name, axis = parameter.name, parameter.last_axis
    leading = [sizes["B"], sizes["T"], sizes["H"]]
    full = [*leading, sizes[axis]] if axis else leading
    wanted = f"a number or a tensor {parameter.shape} = {' or '.join(_shapes(leading, full, parameter))}"
    if value is None:
        _refuse(name, f"{wanted} ({parameter.symbol}), which this design needs", "None")
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        _refuse(name, wanted, _shown(value))
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            _refuse(name, "a floating-point tensor", str(value.dtype))
        _check_device(name, value, device)
        shared = list(value.shape) == leading and parameter.optional_axis
        if value.ndim and list(value.shape) != full and not shared:
            _refuse(name, wanted, f"shape {list(value.shape)}")
        tensor = value.to(dtype)
        tensor = tensor.expand(full) if not value.ndim else tensor[..., None].expand(full) if shared else tensor
    else:
        tensor = torch.full(full, float(value), dtype=dtype, device=device)
    _check_finite(name, tensor)
    _check_bound(name, tensor, parameter.bound)
    if not axis and name in ("write_noise", "prior_variance"):
        tensor = tensor[..., None]  # one gain for all columns
    return tensor


def _shapes(leading: list[int], full: list[int], parameter: StepParameter) -> list[str]:
    return [str(leading), str(full)] if parameter.optional_axis else [str(full)]


def _check_bound(name: str, x: Tensor, bound: str) -> None:
    bad = {"> 0": x <= 0, ">= 0": x < 0, "<= 0": x > 0}.get(bound)
    if bad is None or not bool(bad.any()):
        return
    index = bad.nonzero()[0].tolist()
    what = "log-decays <= 0 (decays of at most one)" if name == "log_decay" else f"variances {bound}"
    _refuse(name, what, f"{x[tuple(index)].item():.6g} at {_where(index)}")


def _check_finite(name: str, x: Tensor) -> None:
    bad = _first_non_finite(x)
    if bad is not None:
        where = _where(bad) if "." not in name else f"index {bad}"
        _refuse(name, "finite values", f"{x[tuple(bad)].item()} at {where}")


def _first_non_finite(x: Tensor) -> list[int] | None:
    finite = torch.isfinite(x)
    return None if bool(finite.all()) else (~finite).nonzero()[0].tolist()


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        _refuse(name, f"a tensor on the device of q, {device}", f"one on {x.device}")


def _why_unused(design: DesignModel, name: str) -> str:
    if name in ("log_decay", "angle"):
        return f"the transition {type(design.transition).__name__} has no {name}"
    if name == "process_noise":
        return f"{design.title} propagates no predicted covariance that it could enter"
    return f"{design.title} starts from the prior of its covariance, {design.covariance!r}"


def _where(index: list[int]) -> str:
    named = [f"{axis} {i}" for axis, i in zip(_AXES, index, strict=False)]
    return ", ".join([*named, *(f"entry {i}" for i in index[3:])])


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})" if value is not None else "None"


def _refuse(argument: str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")
