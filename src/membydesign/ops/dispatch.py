"""The one place that chooses how a design is filtered."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.design import Dense, Diagonal, Identity, PerColumnReset, Transition
from membydesign.ops import fla, mean_pass, mean_pass_cpu, transforms
from membydesign.ops.additive import chunk as additive
from membydesign.ops.delta import chunk as delta
from membydesign.ops.generalised_delta import chunk as generalised_delta
from membydesign.ops.kalman import chunk as kalman
from membydesign.ops.kalman import cpu, diagonal, diagonal_cpu, triton_support, triton_table
from membydesign.ops.recurrent import RULES, Run, filter_recurrent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from membydesign.belief import Belief
    from membydesign.design import DesignModel
    from membydesign.ops.generalised_delta.naive import Steps
    from membydesign.ops.inputs import Inputs


class Choice(NamedTuple):
    """How native code runs the dense filter.

    Attributes:
        size: how many tokens a chunk has; or, token by token, how many lie between two beliefs saved for backward.
        by_token: token by token, or chunk by chunk.
    """

    size: int
    by_token: bool = False


NATIVE = ((32, Choice(16, by_token=True)), (64, Choice(32)), (256, Choice(64)))
"""What is fastest on a CPU up to each D; beyond the last, as for it. `mbd bench --choices` measures it anew."""

TORCH = 64
"""The most tokens in a chunk of the torch form; never more than D of them (or 16), beyond which rounding grows."""


def native_choice(D: int, chunk_size: int | None = None) -> Choice:
    """The way for a key size, or for the chunk size that a user wants; chunks of one token go token by token."""
    if chunk_size is not None and chunk_size > 1:
        return Choice(chunk_size)
    if chunk_size == 1:
        return Choice(16 if D <= 32 else 32 if D <= 64 else 64, by_token=True)
    return next((choice for most, choice in NATIVE if most >= D), NATIVE[-1][1])


def run_filter(
    design: DesignModel,
    initial: Belief,
    inputs: Inputs,
    *,
    method: str,
    backend: str,
    chunk_size: int | None,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """Filter [B,T] by the given method; a drift that is no decay or rotation of rows always goes token by token."""
    wanted: dict[str, Any] = {"return_variance": return_variance, "return_evidence": return_evidence}
    drift = design.transition.per_row(inputs.log_decay, inputs.angle, inputs.k)
    if method == "recurrent" or drift is None:
        return filter_recurrent(design, initial, inputs, **wanted)
    native = backend not in ("torch", "triton") and inputs.q.device.type == "cpu"
    rows = noise_rows(design, initial)
    if design.rule == "kalman" and isinstance(design.covariance, Dense):
        if backend == "triton" or (backend == "auto" and chunk_size is None and fits_triton(inputs)):
            from membydesign.ops.kalman.triton import filter_triton

            options = {"input_precision": _input_precision(), "fallback": backend == "auto"}
            return filter_triton(drift, rows, initial, inputs, **options, **wanted)
        choice = native_choice(inputs.q.shape[-1], chunk_size)
        if native and cpu.available(inputs.q.dtype, choice.by_token):
            return cpu.filter_native(
                drift, rows, initial, inputs, _within(choice.size, inputs), by_token=choice.by_token, **wanted
            )
        size = chunk_size or min(TORCH, max(16, inputs.q.shape[-1]))
        return kalman.filter_chunk(drift, rows, initial, inputs, _within(size, inputs), **wanted)
    native = native and mean_pass_cpu.available(inputs.q.dtype)
    means = mean_pass_cpu.mean_pass if native else mean_pass.mean_pass
    each_column = isinstance(design.covariance, PerColumnReset)
    size = _within(chunk_size or _mean_chunk(native, inputs.q.shape[-1], each_column=each_column), inputs)
    match design.rule:
        case "delta":
            return delta.filter_chunk(drift, initial, inputs, size, means, **wanted)
        case "additive":
            return additive.filter_chunk(drift, initial, inputs, size, means, **wanted)
        case _:
            assert isinstance(design.covariance, Diagonal)
            native = native and diagonal_cpu.available(inputs.q.dtype)
            gains = diagonal_cpu.gains if native else diagonal.gains
            return diagonal.filter_chunk(drift, rows, initial, inputs, size, gains, means, **wanted)


def run_fla(
    design: DesignModel,
    initial: Belief,
    inputs: Inputs,
    bounds: Sequence[int] | None,
    *,
    dtype: torch.dtype,
    method: str,
    backend: str,
    chunk_size: int | None,
    return_variance: bool,
    return_evidence: bool,
) -> Run | None:
    """Filter by flash-linear-attention's kernels, all packed sequences in one run; None for another way.

    Args:
        design: the assumptions.
        initial: one belief for each sequence.
        inputs: in the state's type.
        bounds: of packed sequences, [N+1], or None.
        dtype: the type in which q, k and v were given.
        method: as `filter_sequence` takes it, like all that follow; "auto" leaves to torch what fla cannot do, what it
            would round more than the user allows, and what torch.compile traces, whose graph it would break.
        backend: "fla" raises a ValueError where "auto" goes another way.
        chunk_size: only for other ways.
        return_variance: also return the variance of every read.
        return_evidence: only for other ways.
    """
    if method == "recurrent" or backend not in ("auto", "fla"):
        return None
    asked = backend == "fla"
    if not asked and (
        inputs.q.device.type not in fla.DEVICES or torch.compiler.is_compiling() or not fla.as_exact(dtype)
    ):
        return None
    drift = design.transition.per_row(inputs.log_decay, inputs.angle, inputs.k)
    reason = fla.why_not(design, drift, inputs, dtype, chunk_size=chunk_size, return_evidence=return_evidence)
    if reason is not None and asked:
        raise ValueError(f'backend: expected "auto" or "torch" {reason}, got "fla"')
    if reason is not None or drift is None:
        return None
    name, decays = fla.name_of(design, drift, dtype), not isinstance(design.transition, Identity)
    means = partial(fla.mean_pass, name=name, dtype=dtype, decays=decays, bounds=bounds)
    rule = delta if design.rule == "delta" else additive
    wanted = {"return_variance": return_variance, "return_evidence": return_evidence}
    return rule.filter_chunk(drift, initial, inputs, 0, means, **wanted)


def run_generalised_delta(
    M: Tensor, x: Steps, *, backend: str = "auto", chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,M] and the memory at the end, [B,H,D,M]; a chunk counts tokens, of two writes each."""
    native = backend != "torch" and M.device.type == "cpu" and mean_pass_cpu.available(M.dtype)
    means = mean_pass_cpu.mean_pass if native else mean_pass.mean_pass
    size = 2 * chunk_size if chunk_size else _mean_chunk(native, x.q.shape[-1])
    return generalised_delta.run(M, x, min(size, 2 * x.q.shape[1]), means)


def run_step(design: DesignModel, belief: Belief, inputs: Inputs) -> tuple[Tensor, Belief, Tensor]:
    """One token, [B,1]: the read-out [B,H,M], the new belief, and the precision of the write [B,1,H,G]."""
    x = inputs.at(0)
    dense = design.rule == "kalman" and isinstance(design.covariance, Dense)
    drift = design.transition.per_row(inputs.log_decay, inputs.angle, inputs.k)
    if dense and drift is not None and fits_triton(inputs) and not _differentiated(belief, inputs):
        from membydesign.ops.kalman.triton_step import step_triton

        found = step_triton(drift, noise_rows(design, belief), belief, x, fallback=True)
        if found is not None:
            output, belief, precision = found
            return output, belief, precision.unsqueeze(1)
    belief, write = RULES[design.rule].step(design, belief, x)
    return belief.read(x.q), belief, write.precision.unsqueeze(1)


def refuse_triton(design: DesignModel, inputs: Inputs, chunk_size: int | None) -> None:
    """Raise if `backend="triton"` cannot be had for this design, device, size or type."""
    D, kind = inputs.q.shape[-1], inputs.q.device.type
    others = 'backend: expected "auto" or "torch" for'
    triton_support.refuse()
    if design.rule != "kalman" or not isinstance(design.covariance, Dense):
        raise ValueError(f'{others} {design.title}, which has no Triton kernel, got "triton"')
    if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'{others} tensors on {inputs.q.device}, got "triton", which needs a GPU (or TRITON_INTERPRET=1 in the '
            "environment from the start, to run its kernels slowly on a CPU)"
        )
    if D > triton_table.LARGEST:
        raise ValueError(f'{others} keys of size {D}, got "triton", whose kernels go up to {triton_table.LARGEST}')
    if chunk_size not in (None, triton_table.CHUNK):
        raise ValueError(f'chunk_size: expected None or {triton_table.CHUNK} with backend="triton", got {chunk_size}')


def fits_triton(inputs: Inputs) -> bool:
    """Whether the Triton kernels are the best way for these inputs: float32, on a GPU, of a size that they have."""
    q = inputs.q
    on_gpu = q.device.type == "cuda" and q.dtype == torch.float32
    return on_gpu and q.shape[-1] <= triton_table.LARGEST and triton_support.usable()


def noise_rows(design: DesignModel, belief: Belief) -> Tensor:
    """The diagonal of N, [D], or [1] where all rows are alike."""
    everywhere = type(design.transition).noise_rows is Transition.noise_rows
    return belief.mean.new_ones(1) if everywhere else design.transition.noise_rows(belief.mean)


def _differentiated(belief: Belief, inputs: Inputs) -> bool:
    """Whether a gradient may be asked for, or torch follows each operation: then the step is taken in torch."""
    if torch.compiler.is_compiling() or transforms.followed():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*belief, *inputs))


def _input_precision() -> str:
    """How the GPU kernels multiply: MEMBYDESIGN_INPUT_PRECISION in the environment, "ieee" unless it is set."""
    wanted = os.environ.get("MEMBYDESIGN_INPUT_PRECISION", "ieee")
    if wanted not in ("ieee", "tf32x3"):
        raise ValueError(f'MEMBYDESIGN_INPUT_PRECISION: expected "ieee" or "tf32x3", got {wanted!r}')
    return wanted


def _mean_chunk(native: bool, D: int, *, each_column: bool = False) -> int:
    """C of the mean given gains, where the user names none."""
    if native:
        return 16 if D <= 16 else 32 if D <= 128 else 64
    return 16 if each_column else 64  # a triangular system for every value column


def _within(size: int, inputs: Inputs) -> int:
    return min(size, inputs.q.shape[1])
