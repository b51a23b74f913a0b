"""The dense filter in native code on a CPU: `kalman.c`, as torch custom operators with a backward.

Forward saves the belief once every few tokens; backward runs each stretch anew and then walks it back.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops import native
from membydesign.ops.kalman.chunk import refuse_second_derivatives
from membydesign.ops.recurrent import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs

SOURCE = Path(__file__).with_name("kalman.c")


def _interval(D: int) -> int:
    """Tokens between two saved beliefs: more of them save memory, fewer keep what backward holds of a head in cache."""
    return 16 if D <= 32 else 32 if D <= 64 else 64


_READY: dict[torch.dtype, bool] = {}


def available(dtype: torch.dtype) -> bool:
    """Whether the native filter can be had for this type.

    Nothing can be compiled or loaded while torch.compile traces: there it is available if it was used before.
    """
    if not torch.compiler.is_compiling():
        _READY[dtype] = dtype in native.REALS and native.library(SOURCE, dtype) is not None
    return _READY.get(dtype, False)


def _fields(numbers: str, pointers: str) -> list[tuple[str, Any]]:
    return [(n, ctypes.c_int64) for n in numbers.split()] + [(p, ctypes.c_void_p) for p in pointers.split()]


class _Inputs(ctypes.Structure):
    _fields_ = _fields("T H G D M R rotates interval", "q k v l2 r2 a s rows")


class _Outputs(ctypes.Structure):
    _fields_ = _fields("", "M P o b e variance saved_M saved_P")


class _Gradients(ctypes.Structure):
    _fields_ = _fields("", "saved_M saved_P o b e variance M P q k v l2 r2 log_a angle")


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)


def _filled(struct: type[ctypes.Structure], tensors: dict[str, Tensor | None], **numbers: int) -> ctypes.Structure:
    return struct(**numbers, **{name: None if x is None else x.data_ptr() for name, x in tensors.items()})


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    l2: Tensor,
    r2: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    G: int,
) -> tuple[ctypes.Structure, list[Tensor | None]]:
    """The C view of the inputs, and the tensors that it points into."""
    _, T, H, D = q.shape
    radius = log_decay.exp()
    a, s = (radius, None) if angle is None else (radius * angle.cos(), radius * angle.sin())
    keep = {"q": q, "k": k, "v": v, "l2": l2, "r2": r2, "a": a, "s": s, "rows": rows}
    keep = {name: None if x is None else x.contiguous() for name, x in keep.items()}
    numbers = {
        "T": T,
        "H": H,
        "G": G,
        "D": D,
        "M": v.shape[-1] // G,
        "R": log_decay.shape[-1],
        "rotates": int(angle is not None),
    }
    return _filled(_Inputs, keep, **numbers, interval=_interval(D)), list(keep.values())


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    process_noise: Tensor,
    write_noise: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    mean: Tensor,
    covariance: Tensor,
    with_variance: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, mean, covariance, precision, error, variance (empty unless asked for), and the saved beliefs.

    Rows of a rotation are de-interleaved. log_decay is [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle; mean is
    [B,H,G,D,M/G].
    """
    B, T, H, D = q.shape
    G, m = mean.shape[2], mean.shape[-1]
    K = -(-T // _interval(D)) if save else 0
    mean, covariance = mean.contiguous().clone(), covariance.contiguous().clone()
    output, error = q.new_empty(B, T, H, G * m), q.new_empty(B, T, H, G * m)
    precision = q.new_empty(B, T, H, G)
    variance = q.new_empty(B, T, H, G) if with_variance else q.new_empty(0)
    saved_M, saved_P = q.new_empty(B, H, G, K, D, m), q.new_empty(B, H, G, K, D, D)
    x, alive = _inputs(q, k, v, process_noise, write_noise, log_decay, angle, rows, G)
    found = {
        "M": mean,
        "P": covariance,
        "o": output,
        "b": precision,
        "e": error,
        "variance": variance if with_variance else None,
        "saved_M": saved_M if save else None,
        "saved_P": saved_P if save else None,
    }
    y = _filled(_Outputs, found)
    _call("forward", q.dtype, x, y, B * H)
    del alive
    return output, mean, covariance, precision, error, variance, saved_M, saved_P


kalman_forward = torch.library.custom_op("membydesign::kalman_forward", forward, mutates_args=())


@kalman_forward.register_fake
def _(q, k, v, process_noise, write_noise, log_decay, angle, rows, mean, covariance, with_variance, save):
    del k, v, process_noise, log_decay, angle, rows
    B, T, H, D = q.shape
    G, m = mean.shape[2], mean.shape[-1]
    K = -(-T // _interval(D)) if save else 0
    variance = q.new_empty(B, T, H, G) if with_variance else q.new_empty(0)
    values = q.new_empty(B, T, H, G * m)
    return (
        values,
        _empty(mean),
        _empty(covariance),
        write_noise.new_empty(B, T, H, G),
        torch.empty_like(values),
        variance,
        q.new_empty(B, H, G, K, D, m),
        q.new_empty(B, H, G, K, D, D),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    process_noise: Tensor,
    write_noise: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    saved_M: Tensor,
    saved_P: Tensor,
    d_output: Tensor,
    d_mean: Tensor,
    d_covariance: Tensor,
    d_precision: Tensor,
    d_error: Tensor,
    d_variance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, process_noise, write_noise, log_decay, angle (empty without one), mean and covariance."""
    B, _, H, _ = q.shape
    x, alive = _inputs(q, k, v, process_noise, write_noise, log_decay, angle, rows, saved_M.shape[2])
    dM = d_mean.contiguous().clone()
    dP = ((d_covariance + d_covariance.mT) / 2).contiguous()
    found = {
        "q": _zeros(q),
        "k": _zeros(k),
        "v": _empty(v),
        "l2": _zeros(process_noise),
        "r2": _empty(write_noise),
        "log_a": _zeros(log_decay),
        "angle": q.new_zeros(0) if angle is None else _zeros(angle),
    }
    given = {
        "o": d_output,
        "b": d_precision,
        "e": d_error,
        "variance": d_variance,
        "saved_M": saved_M,
        "saved_P": saved_P,
    }
    given = {name: None if t is None else t.contiguous() for name, t in given.items()}
    pointers = {**given, "M": dM, "P": dP, **found, "angle": None if angle is None else found["angle"]}
    _call("backward", q.dtype, x, _filled(_Gradients, pointers), B * H)
    del alive
    dq, dk, dv, dl2, dr2, dlog_decay, dangle = found.values()
    return dq, dk, dv, dl2, dr2, dlog_decay, dangle, dM, dP


kalman_backward = torch.library.custom_op("membydesign::kalman_backward", backward, mutates_args=())


@kalman_backward.register_fake
def _(q, k, v, process_noise, write_noise, log_decay, angle, rows, saved_M, saved_P, *grads):
    del rows, saved_M, saved_P
    own = [_empty(t) for t in (q, k, v, process_noise, write_noise, log_decay)]
    own.append(q.new_empty(0) if angle is None else _empty(angle))
    return (*own, _empty(grads[1]), _empty(grads[2]))


def _call(name: str, dtype: torch.dtype, x: ctypes.Structure, y: ctypes.Structure, heads: int) -> None:
    compiled = native.library(SOURCE, dtype)
    assert compiled is not None
    function = getattr(compiled, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    function(ctypes.byref(x), ctypes.byref(y), heads, min(heads, torch.get_num_threads()))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, process_noise, write_noise, log_decay, angle, rows, *_, with_variance, save = inputs
    assert save, "a backward needs the saved beliefs"
    ctx.with_variance = with_variance
    ctx.save_for_backward(q, k, v, process_noise, write_noise, log_decay, angle, rows, *output[-2:])


def _gradients(operator: Callable[..., tuple[Tensor, ...]], ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The gradients of `forward`'s arguments, by `backward` or by the operator made of it."""
    d_output, d_mean, d_covariance, d_precision, d_error, d_variance, *_ = grads
    given = (d_output, d_mean, d_covariance, d_precision, d_error, d_variance if ctx.with_variance else None)
    dq, dk, dv, dl2, dr2, dlog_decay, dangle, dmean, dcovariance = operator(*ctx.saved_tensors, *given)
    has_angle = ctx.saved_tensors[6] is not None
    return dq, dk, dv, dl2, dr2, dlog_decay, dangle if has_angle else None, None, dmean, dcovariance, None, None


kalman_forward.register_autograd(
    lambda ctx, *grads: _gradients(kalman_backward, ctx, grads), setup_context=_setup_context
)


class _Eager(torch.autograd.Function):
    """The same operator without the dispatcher, whose first call would import torch's compiler for a few seconds."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        found = forward(*inputs)
        if inputs[-1]:
            _setup_context(ctx, inputs, found)
        ctx.mark_non_differentiable(*found[-2:])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives(grads)
        return _gradients(backward, ctx, grads)


def _apart(x: Tensor, dim: int) -> Tensor:
    """Pairs of rows de-interleaved along an axis (counted from the end): real parts, then imaginary parts."""
    return x.unflatten(dim, (-1, 2)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def _together(x: Tensor, dim: int) -> Tensor:
    """The inverse of `_apart`."""
    return x.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def filter_native(
    drift: RowDrift, rows: Tensor, initial: Belief, x: Inputs, *, return_variance: bool, return_evidence: bool
) -> Run:
    """`ObserveMemory` with `Dense`, over [B,T]; `rows` is the diagonal of N, [D] or [1]."""
    assert x.process_noise is not None
    assert initial.covariance is not None
    D, G = x.q.shape[-1], x.write_noise.shape[-1]
    mean = initial.mean.unflatten(-1, (G, -1)).movedim(-2, 2)
    covariance = initial.covariance
    rows = rows.expand(D)
    q, k, log_decay = x.q, x.k, drift.log_decay
    if drift.angle is not None:
        q, k, rows, mean = _apart(q, -1), _apart(k, -1), _apart(rows, -1), _apart(mean, -2)
        covariance, log_decay = _apart(_apart(covariance, -1), -2), log_decay[..., 0::2]
    leaves = (q, k, x.v, x.process_noise, x.write_noise, log_decay, drift.angle, mean, covariance)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
    operator = kalman_forward if torch.compiler.is_compiling() else _Eager.apply
    output, mean, covariance, precision, error, variance, *_ = operator(
        q, k, x.v, x.process_noise, x.write_noise, log_decay, drift.angle, rows, mean, covariance, return_variance, save
    )
    if drift.angle is not None:
        mean, covariance = _together(mean, -2), _together(_together(covariance, -1), -2)
    return Run(
        output,
        Belief(mean.movedim(2, -2).flatten(-2), covariance),
        precision,
        variance.clamp_min(0) if return_variance else None,
        gaussian_log_density(error, precision) if return_evidence else None,
    )
