"""The mean given gains, in native code on a CPU: `c/mean_pass.c`, the same as ops/mean_pass.py.

Forward saves the mean at every chunk's start; backward computes the inside of a chunk anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor  # noqa: TC002 (torch reads the annotations of operators)

from membydesign.ops import native, operator
from membydesign.ops.mean_pass import Gains, MeanPass

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    import torch

    from membydesign.design import RowDrift

SOURCE = "mean_pass.c"
_Inputs = operator.structure("T H S D M R rotates C", "q k v d strength a cos sin")
_Outputs = operator.structure("", "M o e saved")
_Gradients = operator.structure("", "saved o e M q k v d strength log_a angle")


def available(dtype: torch.dtype) -> bool:
    """Whether the native pass can be had for this type."""
    return native.available(SOURCE, dtype)


def _inputs(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    direction: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    size: int,
) -> tuple[ctypes.Structure, list[Tensor]]:
    _, T, H, D = q.shape
    cos, sin = (None, None) if angle is None else (angle.cos(), angle.sin())
    tensors = {"q": q, "k": k, "v": v, "d": direction, "strength": strength, "a": log_decay.exp()}
    return operator.filled(
        _Inputs,
        {**tensors, "cos": cos, "sin": sin},
        T=T,
        H=H,
        S=strength.shape[-1],
        D=D,
        M=v.shape[-1],
        R=log_decay.shape[-1],
        rotates=int(angle is not None),
        C=size,
    )


def _shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, _, v, _, _, _, _, mean, size, with_error, save = inputs
    B, H, D, M = mean.shape
    boundaries = -(-q.shape[1] // size) + 1 if save else 0
    error = v.new_empty(v.shape if with_error else 0)
    return v.new_empty(v.shape), mean.new_empty(mean.shape), error, q.new_empty(B, H, boundaries, D, M)


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    direction: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    mean: Tensor,
    size: int,
    with_error: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, mean at the end, errors (empty unless asked for), and the mean at all boundaries.

    Rows of the mean are de-interleaved for a rotation. log_decay is [B,T,H,1] or [B,T,H,D]; [B,T,H,D/2] with an angle.
    """
    output, end, error, saved = _shapes(q, k, v, direction, strength, log_decay, angle, mean, size, with_error, save)
    end.copy_(mean)
    x, alive = _inputs(q, k, v, direction, strength, log_decay, angle, size)
    y, _ = operator.filled(
        _Outputs, {"M": end, "o": output, "e": error if with_error else None, "saved": saved if save else None}
    )
    operator.call(SOURCE, "forward", q.dtype, x, y, q.shape[0] * q.shape[2])
    del alive
    return output, end, error, saved


def _shapes_back(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, direction, strength, log_decay, angle, *_, d_mean, _ = inputs
    none = q.new_empty(0)
    own = (q, none if k is None else k, v, direction, strength, log_decay, none if angle is None else angle, d_mean)
    dq, dk, dv, dd, dstrength, dlog_decay, dangle, dmean = (x.new_zeros(x.shape) for x in own)
    return dq, dk, dv, dd, dstrength, dlog_decay, dangle, dmean


def backward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    direction: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    saved: Tensor,
    size: int,
    d_output: Tensor,
    d_mean: Tensor,
    d_error: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k (empty without one), v, direction, strength, log_decay, angle (likewise) and mean."""
    found = _shapes_back(q, k, v, direction, strength, log_decay, angle, saved, size, d_output, d_mean, d_error)
    dq, dk, dv, dd, dstrength, dlog_decay, dangle, dmean = found
    dmean.copy_(d_mean)
    x, alive = _inputs(q, k, v, direction, strength, log_decay, angle, size)
    given = {"saved": saved, "o": d_output, "e": d_error, "M": dmean}
    own = {"q": dq, "k": None if k is None else dk, "v": dv, "d": dd, "strength": dstrength, "log_a": dlog_decay}
    y, also = operator.filled(_Gradients, {**given, **own, "angle": None if angle is None else dangle})
    operator.call(SOURCE, "backward", q.dtype, x, y, q.shape[0] * q.shape[2])
    del alive, also
    return found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mean, size, with_error, _ = inputs
    ctx.size, ctx.with_error, ctx.shapes = size, with_error, (tensors[2].shape, mean.shape)
    ctx.save_for_backward(*tensors, output[-1])


def _gradients(
    operation: Callable[..., tuple[Tensor, ...]], ctx: Any, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    d_output, d_mean, d_error, _ = grads
    saved = ctx.saved_tensors  # once: activation checkpointing allows no more
    always = (
        saved[0].new_zeros(shape) if d is None else d for d, shape in zip((d_output, d_mean), ctx.shapes, strict=True)
    )
    dq, dk, dv, dd, dstrength, dlog_decay, dangle, dmean = operation(
        *saved, ctx.size, *always, d_error if ctx.with_error else None
    )
    has_k, has_angle = saved[1] is not None, saved[6] is not None
    own = (dq, dk if has_k else None, dv, dd, dstrength, dlog_decay, dangle if has_angle else None, dmean)
    return (*own, None, None, None)


OPERATOR = operator.differentiable(
    "mean_pass",
    forward,
    backward,
    shapes=_shapes,
    shapes_back=_shapes_back,
    remember=_remember,
    gradients=_gradients,
    saved=1,
)


def mean_pass(
    drift: RowDrift,
    size: int,
    mean: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gains: Gains,
    *,
    return_error: bool,
) -> MeanPass:
    """Run the mean over all chunks; the arguments of `ops.mean_pass.mean_pass`."""
    direction, strength = gains
    angle = drift.angle
    log_decay = drift.log_decay if angle is None else drift.of_pairs()
    if groups := direction.shape[3] if direction.ndim == 5 else 0:  # groups that write in their own directions
        q, log_decay = _for_groups(q, groups), _for_groups(log_decay, groups)
        k = None if k is None else _for_groups(k, groups)
        angle = None if angle is None else _for_groups(angle, groups)
        direction, strength = direction.flatten(2, 3), strength.unsqueeze(-1).flatten(2, 3)
        v = v.unflatten(-1, (groups, -1)).flatten(2, 3)
        mean = mean.unflatten(-1, (groups, -1)).movedim(3, 2).flatten(1, 2)
    if angle is not None:
        mean = operator.apart(mean, -2)
    output, end, error, _ = OPERATOR.apply(q, k, v, direction, strength, log_decay, angle, mean, size, return_error)
    if angle is not None:
        end = operator.together(end, -2)
    if groups:
        output = output.unflatten(2, (-1, groups)).flatten(-2)
        error = error.unflatten(2, (-1, groups)).flatten(-2) if return_error else error
        end = end.unflatten(1, (-1, groups)).movedim(2, 3).flatten(-2)
    return MeanPass(output, error if return_error else None, end)


def _for_groups(x: Tensor, groups: int) -> Tensor:
    """[B,T,H,·] → [B,T,H·G,·], the same for every group."""
    return x.unsqueeze(3).expand(*x.shape[:3], groups, x.shape[-1]).flatten(2, 3)
