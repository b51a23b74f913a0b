"""The dense filter in native code on a CPU: `c/kalman_token.c` for small D, `c/kalman_chunk.c` for large.

Forward saves the belief once every few tokens; backward runs each stretch anew and then walks it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor  # noqa: TC002 (torch reads the annotations of operators)

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops import native, operator
from membydesign.ops.recurrent import Run

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    import torch

    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs

TOKEN, CHUNK = "kalman_token.c", "kalman_chunk.c"
_Inputs = operator.structure("T H G D M R rotates C", "q k v l2 r2 a cos sin rows")
_Outputs = operator.structure("", "M P o b e variance saved_M saved_P")
_Gradients = operator.structure("", "saved_M saved_P o b e variance M P q k v l2 r2 log_a angle")


def source(by_token: bool) -> str:
    """The C source of the filter, token by token or chunk by chunk."""
    return TOKEN if by_token else CHUNK


def available(dtype: torch.dtype, by_token: bool) -> bool:
    """Whether the native filter can be had for this type."""
    return native.available(source(by_token), dtype)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    process_noise: Tensor,
    write_noise: Tensor,
    log_decay: Tensor,
    angle: Tensor | None,
    rows: Tensor,
    size: int,
) -> tuple[ctypes.Structure, list[Tensor]]:
    _, T, H, D = q.shape
    G = write_noise.shape[-1]
    cos, sin = (None, None) if angle is None else (angle.cos(), angle.sin())
    tensors = {"q": q, "k": k, "v": v, "l2": process_noise, "r2": write_noise, "a": log_decay.exp(), "rows": rows}
    return operator.filled(
        _Inputs,
        {**tensors, "cos": cos, "sin": sin},
        T=T,
        H=H,
        G=G,
        D=D,
        M=v.shape[-1] // G,
        R=log_decay.shape[-1],
        rotates=int(angle is not None),
        C=size,
    )


def _shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, _, v, _, write_noise, _, _, _, mean, covariance, size, _, with_variance, with_error, save = inputs
    B, H, G, D, m = mean.shape
    boundaries = -(-q.shape[1] // size) + 1 if save else 0
    return (
        v.new_empty(v.shape),
        mean.new_empty(mean.shape),
        covariance.new_empty(covariance.shape),
        write_noise.new_empty(write_noise.shape),
        v.new_empty(v.shape if with_error else 0),
        q.new_empty(write_noise.shape if with_variance else 0),
        q.new_empty(B, H, G, boundaries, D, m),
        q.new_empty(B, H, G, boundaries, D, D),
    )


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
    size: int,
    by_token: bool,
    with_variance: bool,
    with_error: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, mean, covariance, precision, error and variance (empty unless asked for), and the saved beliefs.

    For a rotation, rows of the belief are de-interleaved, and those of q and k if it goes by token. log_decay is
    [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle; mean is [B,H,G,D,M/G].
    """
    shared = (q, k, v, process_noise, write_noise, log_decay, angle, rows)
    found = _shapes(*shared, mean, covariance, size, by_token, with_variance, with_error, save)
    output, end_mean, end_covariance, precision, error, variance, saved_M, saved_P = found
    end_mean.copy_(mean)
    end_covariance.copy_(covariance)
    x, alive = _inputs(*shared, size)
    own = {"M": end_mean, "P": end_covariance, "o": output, "b": precision}
    asked = {"e": error if with_error else None, "variance": variance if with_variance else None}
    saved = {"saved_M": saved_M if save else None, "saved_P": saved_P if save else None}
    y, _ = operator.filled(_Outputs, {**own, **asked, **saved})
    operator.call(source(by_token), "forward", q.dtype, x, y, q.shape[0] * q.shape[2])
    del alive
    return found


def _shapes_back(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, process_noise, write_noise, log_decay, angle, *_, d_mean, d_covariance, _, _, _ = inputs
    turned = q.new_empty(0) if angle is None else angle
    own = (q, k, v, process_noise, write_noise, log_decay, turned, d_mean, d_covariance)
    dq, dk, dv, dl2, dr2, dlog_decay, dangle, dmean, dcovariance = (x.new_zeros(x.shape) for x in own)
    return dq, dk, dv, dl2, dr2, dlog_decay, dangle, dmean, dcovariance


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
    size: int,
    by_token: bool,
    d_output: Tensor,
    d_mean: Tensor,
    d_covariance: Tensor,
    d_precision: Tensor | None,
    d_error: Tensor | None,
    d_variance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, process_noise, write_noise, log_decay, angle (empty without one), mean and covariance."""
    shared = (q, k, v, process_noise, write_noise, log_decay, angle, rows)
    given = (d_output, d_mean, d_covariance, d_precision, d_error, d_variance)
    found = _shapes_back(*shared, saved_M, saved_P, size, by_token, *given)
    dq, dk, dv, dl2, dr2, dlog_decay, dangle, dmean, dcovariance = found
    dmean.copy_(d_mean)
    dcovariance.copy_((d_covariance + d_covariance.mT) / 2)
    x, alive = _inputs(*shared, size)
    outputs = {"o": d_output, "b": d_precision, "e": d_error, "variance": d_variance, "M": dmean, "P": dcovariance}
    own = {"q": dq, "k": dk, "v": dv, "l2": dl2, "r2": dr2, "log_a": dlog_decay}
    kept = {"saved_M": saved_M, "saved_P": saved_P, "angle": None if angle is None else dangle}
    y, also = operator.filled(_Gradients, {**outputs, **own, **kept})
    operator.call(source(by_token), "backward", q.dtype, x, y, q.shape[0] * q.shape[2])
    del alive, also
    return found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mean, covariance, size, by_token, with_variance, with_error, save = inputs
    assert save, "a backward needs the saved beliefs"
    ctx.way, ctx.asked = (size, by_token), (with_error, with_variance)
    ctx.shapes = (tensors[2].shape, mean.shape, covariance.shape)
    ctx.save_for_backward(*tensors, *output[-2:])


def _gradients(
    operation: Callable[..., tuple[Tensor, ...]], ctx: Any, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    d_output, d_mean, d_covariance, d_precision, d_error, d_variance, _, _ = grads
    saved = ctx.saved_tensors  # once: activation checkpointing allows no more
    always = (
        saved[0].new_zeros(shape) if d is None else d
        for d, shape in zip((d_output, d_mean, d_covariance), ctx.shapes, strict=True)
    )
    asked = (d if wanted else None for d, wanted in zip((d_error, d_variance), ctx.asked, strict=True))
    *found, dangle, dmean, dcovariance = operation(*saved, *ctx.way, *always, d_precision, *asked)
    has_angle = saved[6] is not None
    return (*found, dangle if has_angle else None, None, dmean, dcovariance, *[None] * 5)


OPERATOR = operator.differentiable(
    "kalman",
    forward,
    backward,
    shapes=_shapes,
    shapes_back=_shapes_back,
    remember=_remember,
    gradients=_gradients,
    saved=2,
    shared=(7,),  # rows
)


def filter_native(
    drift: RowDrift,
    rows: Tensor,
    initial: Belief,
    x: Inputs,
    size: int,
    *,
    by_token: bool,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`ObserveMemory` with `Dense`, over [B,T]; `rows` is the diagonal of N, [D] or [1].

    `size` is how many tokens a chunk has, or how many lie between two saved beliefs if it goes `by_token`.
    """
    assert x.process_noise is not None
    assert initial.covariance is not None
    D, G = x.q.shape[-1], x.write_noise.shape[-1]
    mean = initial.mean.unflatten(-1, (G, -1)).movedim(-2, 2)
    q, k, covariance = x.q, x.k, initial.covariance
    rows, angle = rows.expand(D), drift.angle
    log_decay = drift.log_decay if angle is None else drift.of_pairs()
    if angle is not None:
        rows = operator.apart(rows, -1)
        if by_token:
            q, k = operator.apart(q, -1), operator.apart(k, -1)
        mean, covariance = operator.apart(mean, -2), operator.apart(operator.apart(covariance, -1), -2)
    output, mean, covariance, precision, error, variance, *_ = OPERATOR.apply(
        *(q, k, x.v, x.process_noise, x.write_noise, log_decay, angle, rows, mean, covariance),
        *(size, by_token, return_variance, return_evidence),
    )
    if angle is not None:
        mean, covariance = operator.together(mean, -2), operator.together(operator.together(covariance, -1), -2)
    return Run(
        output,
        Belief(mean.movedim(2, -2).flatten(-2), covariance),
        precision,
        variance.clamp_min(0) if return_variance else None,
        gaussian_log_density(error, precision) if return_evidence else None,
    )
