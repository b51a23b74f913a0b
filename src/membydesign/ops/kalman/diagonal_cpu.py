"""The gains of the diagonal covariance in native code on a CPU: `c/diagonal.c`, the same as ops/kalman/diagonal.py.

Forward keeps the variances after every token; backward walks them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor  # noqa: TC002 (torch reads the annotations of operators)

from membydesign.ops import native, operator
from membydesign.ops.kalman.diagonal import DiagonalGains

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    import torch

    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs

SOURCE = "diagonal.c"
_Inputs = operator.structure("T H G D R rotates", "k l2 r2 a2 cos sin rows start")
_Outputs = operator.structure("", "u b p")
_Gradients = operator.structure("", "p_t b_t u b p k l2 r2 log_a angle start")


def available(dtype: torch.dtype) -> bool:
    """Whether the native gains can be had for this type."""
    return native.available(SOURCE, dtype)


def _inputs(
    k: Tensor,
    process_noise: Tensor,
    write_noise: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    start: Tensor,
) -> tuple[ctypes.Structure, list[Tensor]]:
    _, T, H, D = k.shape
    cos, sin = (None, None) if angle is None else (angle.cos(), angle.sin())
    tensors = {"k": k, "l2": process_noise, "r2": write_noise, "a2": (2 * log_decay).exp(), "rows": rows}
    return operator.filled(
        _Inputs,
        {**tensors, "start": start, "cos": cos, "sin": sin},
        T=T,
        H=H,
        G=write_noise.shape[-1],
        D=D,
        R=log_decay.shape[-1],
        rotates=int(angle is not None),
    )


def _shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    k, _, write_noise, *_ = inputs
    shape = (*write_noise.shape, k.shape[-1])
    return k.new_empty(shape), k.new_empty(write_noise.shape), k.new_empty(shape)


def forward(
    k: Tensor,
    process_noise: Tensor,
    write_noise: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    start: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """P̄k [B,T,H,G,D], precision [B,T,H,G] and variances [B,T,H,G,D] of every token; `start` is [B,H,G,D].

    Rows of a rotation are de-interleaved. log_decay is [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle.
    """
    found = _shapes(k, process_noise, write_noise, log_decay, angle, rows, start, save)
    warped, precision, variances = found
    x, alive = _inputs(k, process_noise, write_noise, log_decay, angle, rows, start)
    y, _ = operator.filled(_Outputs, {"u": warped, "b": precision, "p": variances})
    operator.call(SOURCE, "forward", k.dtype, x, y, k.shape[0] * k.shape[2])
    del alive
    return found


def _shapes_back(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    k, process_noise, write_noise, log_decay, angle, _, start, *_ = inputs
    own = (k, process_noise, write_noise, log_decay, k.new_empty(0) if angle is None else angle, start)
    dk, dl2, dr2, dlog_decay, dangle, dstart = (x.new_zeros(x.shape) for x in own)
    return dk, dl2, dr2, dlog_decay, dangle, dstart


def backward(
    k: Tensor,
    process_noise: Tensor,
    write_noise: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    start: Tensor,
    precision: Tensor,
    variances: Tensor,
    d_warped: Tensor,
    d_precision: Tensor,
    d_variances: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, process_noise, write_noise, log_decay, angle (empty without one) and start."""
    shared = (k, process_noise, write_noise, log_decay, angle, rows, start)
    found = _shapes_back(*shared, precision, variances, d_warped, d_precision, d_variances)
    dk, dl2, dr2, dlog_decay, dangle, dstart = found
    x, alive = _inputs(*shared)
    given = {"p_t": variances, "b_t": precision, "u": d_warped, "b": d_precision, "p": d_variances}
    own = {"k": dk, "l2": dl2, "r2": dr2, "log_a": dlog_decay, "start": dstart}
    y, also = operator.filled(_Gradients, {**given, **own, "angle": None if angle is None else dangle})
    operator.call(SOURCE, "backward", k.dtype, x, y, k.shape[0] * k.shape[2])
    del alive, also
    return found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:-1], *output[1:])


def _gradients(
    operation: Callable[..., tuple[Tensor, ...]], ctx: Any, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing allows no more
    *_, precision, variances = saved
    outputs = (variances, precision, variances)  # or what has their shapes
    all_grads = (x.new_zeros(x.shape) if d is None else d for d, x in zip(grads, outputs, strict=True))
    *found, dangle, dstart = operation(*saved, *all_grads)
    has_angle = saved[4] is not None
    return (*found, dangle if has_angle else None, None, dstart, None)


OPERATOR = operator.differentiable(
    "diagonal",
    forward,
    backward,
    shapes=_shapes,
    shapes_back=_shapes_back,
    remember=_remember,
    gradients=_gradients,
    saved=0,
    shared=(5,),  # rows
)


def gains(drift: RowDrift, rows: Tensor, start: Tensor, x: Inputs) -> DiagonalGains:
    """The gains of all tokens; the arguments of `ops.kalman.diagonal.gains`."""
    assert x.process_noise is not None
    k, rows, angle = x.k, rows.expand(x.k.shape[-1]), drift.angle
    log_decay = drift.log_decay if angle is None else drift.of_pairs()
    if angle is not None:
        k, rows, start = (operator.apart(t, -1) for t in (k, rows, start))
    warped, precision, variances = OPERATOR.apply(k, x.process_noise, x.write_noise, log_decay, angle, rows, start)
    if angle is not None:
        warped, variances = operator.together(warped, -1), operator.together(variances, -1)
    return DiagonalGains(warped, precision, variances)
