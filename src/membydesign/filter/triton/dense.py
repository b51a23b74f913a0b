r"""The exact filter of the Bayesian Layer on a GPU: the chunk form of `chunk.py` with its pass over chunks fused.

In torch, for all chunks at once: what does not depend on the belief (the frame, K̃, Q̃, noise built up and its decayed
products), and its gradients. In one Triton kernel (`triton_forward.py`), chunk after chunk with the belief on chip:
K̃P₀, G, its factor, W, X, E, outputs, variances and both exits. In another (`triton_backward.py`): the same anew from
the saved beliefs, and all gradients. Everything is float32 inside, or float64 for float64 beliefs.

Each kernel can fail to compile or launch on its own (the backward's after a forward that succeeded, on another thread,
or inside a graph of torch.compile), so each has its way out where it is called: `triton_fallback.py` computes the same
operator in torch, from the same saved tensors. Whether forward ran as a kernel or in torch, backward finds what it
needs, and activation checkpointing sees the same saved tensors when it runs forward again.
"""

from __future__ import annotations

import functools
import inspect
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton import knobs

from membydesign.belief import Belief
from membydesign.filter.inputs import Run
from membydesign.filter.native import compiled, operators
from membydesign.filter.torch.dense import accumulated_noise, filter_chunk
from membydesign.filter.torch.frame import Frame, cut, joined
from membydesign.filter.transforms import values
from membydesign.filter.triton import fallback as triton_fallback
from membydesign.filter.triton import support as triton_support
from membydesign.filter.triton import table
from membydesign.filter.triton.backward import backward_kernel
from membydesign.filter.triton.forward import forward_kernel
from membydesign.state import map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from membydesign.design import RowDrift, RowNoise
    from membydesign.filter.linear import DenseInputs

SURE = 64
"""A variance along a key this many times its write noise costs float32 more digits in chunks of 16 than in the loop
over tokens (docs/internals/gpu.md). Such a sequence is filtered in float64, by the torch form."""

interpreting: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on a CPU."""


@functools.cache
def _tuned(kernel: Any, D: int, m: int, changed: tuple[str, ...]) -> Any:
    """A kernel that times the configurations of its table on its first call for D and m, and keeps the fastest."""
    choices = (table.FORWARD if kernel is forward_kernel else table.BACKWARD)[table.padded(D)]
    configs = [
        triton.Config(table.constants(tiles, D, m), num_warps=tiles.warps, num_stages=tiles.stages) for tiles in choices
    ]
    return triton.autotune(configs, key=["D", "m", "ROTATES", "VARIANCE"], restore_value=list(changed))(kernel)


def launch(
    kernel: Any, programs: int, D: int, m: int, changed: tuple[str, ...], *, fallback: bool, **arguments: Any
) -> bool:
    """Run a kernel with the best layout for D and m; in the interpreter, with the first of the table.

    Returns:
        Whether it ran; False, only with `fallback`, if it could not be compiled or launched.
    """
    keys, title = arguments["keys"], "forward" if kernel is forward_kernel else "backward"

    def start() -> None:
        if interpreting:
            choices = (table.FORWARD if kernel is forward_kernel else table.BACKWARD)[table.padded(D)]
            kernel[(programs,)](**arguments, D=D, m=m, C=table.CHUNK, **table.constants(choices[0], D, m))
        else:
            with torch.cuda.device_of(keys):  # Triton launches on the device that is current
                tuned = _tuned(kernel, D, m, changed)
                tuned[(programs,)](**arguments, D=D, m=m, C=table.CHUNK, enable_fp_fusion=True)

    flags = tuple(value for value in arguments.values() if isinstance(value, (bool, str)))
    return triton_support.run(title, (title, D, m, keys.dtype, keys.device, *flags), start, fallback=fallback)


def _shapes(*inputs: Any) -> Any:
    keys, values, mean, covariance, with_variance, with_error, save = (inputs[i] for i in (0, 6, 11, 12, 13, 14, -1))
    B, H, G, D, m = mean.shape
    K, C = keys.shape[2:4]
    slots = K + 1 if save else 1
    return (
        values.new_empty(values.shape),
        values.new_empty(mean.shape),
        values.new_empty(covariance.shape),
        values.new_empty(B, H, G, K, C),
        values.new_empty(values.shape if with_error else 0),
        values.new_empty((B, H, G, K, C) if with_variance else 0),
        values.new_empty(B, H, G, K, C),
        values.new_empty(B, H, G, slots, D, m),
        values.new_empty(B, H, G, slots, D, D),
    )


def _rows(pairs: Tensor | None) -> Tensor | None:
    return None if pairs is None else pairs.repeat_interleave(2, -1).contiguous()


def forward(
    keys: Tensor,
    queries: Tensor,
    exits: Tensor,
    built_up: Tensor,
    cross: Tensor,
    write_noise: Tensor,
    values: Tensor,
    decay: Tensor,
    noise: Tensor,
    across: Tensor | None,
    angle: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
    with_variance: bool,
    with_error: bool,
    input_precision: str,
    fallback: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, mean, covariance, precision, whitened error and variance (empty unless asked for), diag G, beliefs.

    Args:
        keys: K̃, [B,H,K,C,D].
        queries: Q̃, likewise.
        exits: J without P₀, likewise.
        built_up: G without P₀ and r², its lower triangle, [B,H,K,C,C].
        cross: H without P₀, likewise.
        write_noise: r², [B,H,G,K,C].
        values: [B,H,G,K,C,M/G].
        decay: f_C, [B,H,K,D].
        noise: the diagonal of n_C, [B,H,K,D].
        across: the entries of n_C between the rows of each pair, [B,H,K,D/2], or None.
        angle: Θ_C, [B,H,K,D/2], or None.
        mean: of the belief at the start, [B,H,G,D,M/G].
        covariance: [B,H,G,D,D].
        with_variance: whether to find q̃ᵀ P₀ q̃ − Σ W², to which noise has yet to be added.
        with_error: whether to return E.
        input_precision: of matrix products, "ieee" or "tf32x3".
        fallback: compute in torch if the kernel cannot be compiled or launched, rather than raise.
        save: whether to keep the beliefs at all chunks' starts, for backward.
    """
    shared = (keys, queries, exits, built_up, cross, write_noise, values, decay, noise)
    keys, queries, exits, built_up, cross, write_noise, values, decay, noise = (x.contiguous() for x in shared)
    result = _shapes(*shared, across, angle, mean, covariance, with_variance, with_error, input_precision, save)
    output, _, _, precision, error, variance, observed, beliefs_M, beliefs_P = result
    beliefs_M[:, :, :, 0] = mean
    beliefs_P[:, :, :, 0] = covariance
    B, H, G, D, m = mean.shape
    K, C = keys.shape[2:4]
    ran = launch(
        forward_kernel,
        B * H * G,
        D,
        m,
        () if save else ("beliefs_M", "beliefs_P"),  # where each try while tuning must find the start again
        fallback=fallback,
        keys=keys,
        queries=queries,
        exits=exits,
        built_up=built_up,
        cross=cross,
        write_noise=write_noise,
        values=values,
        decay=decay,
        noise=noise,
        across=noise if across is None else _rows(across),
        cos=noise if angle is None else _rows(angle.cos()),
        sin=noise if angle is None else _rows(angle.sin()),
        beliefs_M=beliefs_M,
        beliefs_P=beliefs_P,
        output=output,
        error=error,
        precision=precision,
        variance=variance,
        observed=observed,
        scratch=keys.new_empty(B * H * G * C * D),
        K=K,
        G=G,
        ROTATES=angle is not None,
        MIXED=across is not None,
        VARIANCE=with_variance,
        ERROR=with_error,
        SAVE=save,
        PRECISION=input_precision,
    )
    if not ran:
        inputs = (keys, queries, exits, built_up, cross, write_noise, values, decay, noise, across, angle)
        requests = {"with_variance": with_variance, "with_error": with_error, "save": save}
        return triton_fallback.forward(*inputs, mean, covariance, **requests)
    mean, covariance = beliefs_M[:, :, :, -1].clone(), beliefs_P[:, :, :, -1]
    covariance = (covariance + covariance.mT) / 2
    return output, mean, covariance, precision, error, variance, observed, beliefs_M, beliefs_P


def _shapes_back(*inputs: Any) -> Any:
    keys, queries, exits, built_up, cross, write_noise, values, decay, noise, across, angle, *_ = inputs
    G = write_noise.shape[2]

    def each(x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:2], G, *x.shape[2:])

    shared = [each(x) for x in (keys, queries, exits, built_up, cross)]
    own = [write_noise.new_empty(write_noise.shape), values.new_empty(values.shape)]
    rows = [each(x) for x in (decay, noise)]
    turns = [noise.new_empty(0) if x is None else each(noise) for x in (across, angle)]
    saved_M, saved_P = inputs[11:13]
    return (*shared, *own, *rows, *turns, saved_M[:, :, :, 0].clone(), saved_P[:, :, :, 0].clone())


def backward(
    keys: Tensor,
    queries: Tensor,
    exits: Tensor,
    built_up: Tensor,
    cross: Tensor,
    write_noise: Tensor,
    values: Tensor,
    decay: Tensor,
    noise: Tensor,
    across: Tensor | None,
    angle: Tensor | None,
    saved_M: Tensor,
    saved_P: Tensor,
    input_precision: str,
    fallback: bool,
    d_output: Tensor,
    d_mean: Tensor,
    d_covariance: Tensor,
    d_precision: Tensor | None,
    d_error: Tensor | None,
    d_variance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of what `forward` takes, before groups are summed and rows of pairs are joined: see `_gradients`."""
    shared = (keys, queries, exits, built_up, cross, write_noise, values, decay, noise)
    result = _shapes_back(*shared, across, angle, saved_M, saved_P)
    result[-2].copy_(d_mean)
    result[-1].copy_((d_covariance + d_covariance.mT) / 2)
    names = ("keys", "queries", "exits", "built_up", "cross", "write_noise", "values", "decay", "noise")
    passed = dict(zip(names, (x.contiguous() for x in shared), strict=True))
    passed.pop("noise")
    B, H, G, _, D, m = saved_M.shape
    K, C = keys.shape[2:4]
    evidence = d_precision is not None or d_error is not None
    if evidence:
        d_precision = torch.zeros_like(write_noise) if d_precision is None else d_precision
        d_error = torch.zeros_like(values) if d_error is None else d_error
    upstream = {"d_precision": d_precision, "d_error": d_error, "d_variance": d_variance}
    ran = launch(
        backward_kernel,
        B * H * G,
        D,
        m,
        ("d_M", "d_P"),
        fallback=fallback,
        **passed,
        cos=noise if angle is None else _rows(angle.cos()),
        sin=noise if angle is None else _rows(angle.sin()),
        beliefs_M=saved_M,
        beliefs_P=saved_P,
        d_output=d_output.contiguous(),
        **{name: noise if x is None else x.contiguous() for name, x in upstream.items()},
        **{f"d_{name}": x for name, x in zip((*names, "across", "angle", "M", "P"), result, strict=True)},
        scratch=keys.new_empty(B * H * G * 4 * C * D),
        K=K,
        G=G,
        ROTATES=angle is not None,
        MIXED=across is not None,
        VARIANCE=d_variance is not None,
        EVIDENCE=evidence,
        PRECISION=input_precision,
    )
    if not ran:
        inputs = (*shared, across, angle, saved_M[:, :, :, 0], saved_P[:, :, :, 0])
        upstream_all = (d_output, d_mean, d_covariance, d_precision, d_error, d_variance)
        triton_fallback.backward(inputs, upstream_all, into=result)
    return result


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mean, covariance, with_variance, with_error, input_precision, fallback, save = inputs
    assert save, "a backward needs the saved beliefs"
    ctx.options, ctx.requested = (input_precision, fallback), (with_error, with_variance)
    ctx.shapes = (output[0].shape, mean.shape, covariance.shape)
    ctx.save_for_backward(*tensors, *output[-2:])


def _gradients(
    operation: Callable[..., tuple[Tensor, ...]], ctx: Any, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    d_output, d_mean, d_covariance, d_precision, d_error, d_variance, *_ = grads
    saved = ctx.saved_tensors  # once: activation checkpointing allows no more
    always = (
        saved[0].new_zeros(shape) if d is None else d
        for d, shape in zip((d_output, d_mean, d_covariance), ctx.shapes, strict=True)
    )
    gradients = (d if requested else None for d, requested in zip((d_error, d_variance), ctx.requested, strict=True))
    result = operation(*saved, *ctx.options, *always, d_precision, *gradients)
    shared, own, rows, turns = result[:5], result[5:7], result[7:9], result[9:11]
    pairs = [
        None if x is None else d.sum(2).unflatten(-1, (-1, 2)).sum(-1) for x, d in zip(saved[9:11], turns, strict=True)
    ]
    return (
        *(d.sum(2) for d in shared), *own, *(d.sum(2) for d in rows), *pairs, *result[11:], *[None] * 5,
    )  # fmt: skip


OPERATOR = operators.differentiable(
    SimpleNamespace(
        name="kalman_triton",
        forward=forward,
        backward=backward,
        schema=None,  # torch reads it from the annotations
        schema_back=None,
        empty_outputs=_shapes,
        empty_gradients=_shapes_back,
        remember=_remember,
        gradients=_gradients,
        arguments=tuple(inspect.signature(forward).parameters),
        outputs=[SimpleNamespace(name=str(place), private=place >= 6) for place in range(9)],
        inputs=(),  # none without a batch axis
        kept=(),
    )
)
compiled.register()


def filter_triton(
    drift: RowDrift,
    noise: RowNoise,
    initial: Belief,
    x: DenseInputs,
    *,
    return_variance: bool,
    return_evidence: bool,
    input_precision: str = "ieee",
    fallback: bool = False,
) -> Run:
    """`ObserveMemory` with `Dense`, over [B,T].

    A kernel that cannot be compiled or launched raises a `KernelError`, or with `fallback` is replaced by torch.
    """
    C, D, G, length = table.CHUNK, x.q.shape[-1], x.write_noise.shape[-1], x.q.shape[1]
    frame = Frame.of(drift, C)
    k, q = frame.enter(cut(x.k, C)), frame.enter(cut(x.q, C))
    added = accumulated_noise(frame, drift, noise, C)
    noisy_key = added.times(k)
    write_noise = cut(x.write_noise, C, fill=1.0).movedim(-1, 2)
    mixed = drift.angle is not None and len(noise.rows) > 1
    lead = k.shape[:3]
    output, mean, covariance, precision, error, variance, observed, *_ = OPERATOR.run(
        frame.from_start(k),
        frame.from_start(q),
        frame.to_end(noisy_key),
        frame.product(k, noisy_key),
        frame.product(q, noisy_key),
        write_noise,
        cut(x.v, C).unflatten(-1, (G, -1)).movedim(-2, 2),
        frame.over_chunk().expand(*lead, D),
        added.diagonal[..., -1, :].expand(*lead, D),
        added.across[..., -1, :] if mixed and added.across is not None else None,
        None if drift.angle is None else cut(drift.angle, C).cumsum(3)[..., -1, :],
        initial.mean.unflatten(-1, (G, -1)).movedim(-2, 2),
        (initial.covariance + initial.covariance.mT) / 2,
        return_variance,
        return_evidence,
        input_precision,
        fallback,
    )
    if x.q.dtype == torch.float32 and _too_sure(observed, write_noise):
        wide, start, inputs = map_state(lambda t: t.double(), (drift, initial, x))
        requests = {"return_variance": return_variance, "return_evidence": return_evidence}
        run = filter_chunk(wide, noise.map(torch.Tensor.double), start, inputs, C, **requests)
        return map_state(lambda t: t.to(x.q.dtype), run)

    belief = Belief(mean.movedim(2, -2).flatten(-2), covariance)
    found_variance = evidence = squares = None
    if return_variance:
        drifted = (added.times(q) * q).sum(-1)[:, :, None]
        found_variance = joined((variance + drifted).movedim(2, -1), length).clamp_min(0)
    if return_evidence:
        density = error.shape[-1] * (2 * math.pi / precision).log() + (of_errors := error.square().sum(-1))
        evidence, squares = joined(-0.5 * density.sum(2), length), joined(of_errors.movedim(2, -1), length)
    output = joined(output.movedim(2, -2).flatten(-2), length)
    return Run(output, belief, joined(precision.movedim(2, -1), length), found_variance, evidence, squares)


def _too_sure(observed: Tensor, write_noise: Tensor) -> bool:
    """Whether the filter met writes so much surer than memory that conditioning on many at once costs digits."""
    if observed.is_meta or torch.compiler.is_compiling():
        return False
    return bool(values(observed > SURE * write_noise).any())
