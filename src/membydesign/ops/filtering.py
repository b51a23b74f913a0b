"""The two public functions: `filter_sequence` for training and prefill, `filter_step` for decoding."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from membydesign.belief import Belief
from membydesign.ops import checks, transforms
from membydesign.ops.dispatch import refuse_triton, run_filter, run_fla, run_step
from membydesign.ops.one_look import Given, check_after, check_before
from membydesign.ops.packed import run_packed
from membydesign.ops.step import native_step

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs
    from membydesign.ops.recurrent import Run


Method = Literal["chunk", "recurrent"]
Backend = Literal["auto", "torch", "cpu", "triton", "fla"]
BACKENDS: tuple[str, ...] = get_args(Backend)


class Filtered(NamedTuple):
    r"""What `filter_sequence` returns.

    Attributes:
        output: the read-outs $y_t = M_t^\top q_t$, [B,T,H,M], in the dtype of q, k and v.
        belief: the belief after the last token, one per batch entry, or one per packed sequence.
        variance: $q_t^\top P_t q_t$, the variance of each coordinate of $S_t^\top q_t$, [B,T,H,G] ([B,T,H,M] for
            `PerColumnReset`); None unless asked for.
        log_evidence: $\log p(v_{1:T})$, [B,H] ([N,H] packed); None unless asked for.
        write_log_evidence: $\log p(v_t \mid v_{<t})$, how expected each write was, [B,T,H]; None unless asked for.
    """

    output: Tensor
    belief: Belief
    variance: Tensor | None = None
    log_evidence: Tensor | None = None
    write_log_evidence: Tensor | None = None


def filter_sequence(
    design: DesignModel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    process_noise: Tensor | float | None = None,
    write_noise: Tensor | float | None = None,
    prior_variance: Tensor | float | None = None,
    log_decay: Tensor | float | None = None,
    angle: Tensor | float | None = None,
    initial: Belief | None = None,
    cu_seqlens: Tensor | None = None,
    method: Method = "chunk",
    chunk_size: int | None = None,
    backend: Backend = "auto",
    state_dtype: torch.dtype | None = None,
    return_variance: bool = False,
    return_evidence: bool = False,
) -> Filtered:
    r"""Run the filter of a design over whole sequences.

    At each token memory drifts, the write $(k_t, v_t)$ is conditioned on, and $y_t = M_t^\top q_t$ is read: the output
    at t sees the write at t. q is not scaled and k is not normalised. Everything is differentiable.

    Args:
        design: the assumptions; `design.step_parameters` lists which of the arguments below it needs.
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        process_noise: $\ell_t^2$, a variance, [B,T,H].
        write_noise: $r_t^2$, a variance, [B,T,H] or [B,T,H,G].
        prior_variance: $\lambda_t$, [B,T,H], or [B,T,H,M] for `PerColumnReset`.
        log_decay: logarithms of the decays, at most 0, [B,T,H] (`ScalarDecay`), [B,T,H,D] (`DiagonalDecay`) or
            [B,T,H,D/2] (`DampedRotation`).
        angle: $\theta_t$ in radians, [B,T,H,D/2] (`DampedRotation`).
        initial: the belief to start from, default `Belief.prior`; one per packed sequence with `cu_seqlens`.
        cu_seqlens: boundaries [N+1] of N sequences packed into one row (B = 1); belief starts afresh at each.
        method: "chunk", many tokens at once, exactly; or "recurrent", the loop over tokens that specifies the filter.
        chunk_size: how many tokens a chunk has; by default a size that suits the design.
        backend: "torch" for any device, "cpu" for native code, "triton" for the GPU kernels of the dense filter, "fla"
            for flash-linear-attention's GPU kernels (designs that keep no covariance); by default whichever is fastest
            where the tensors are. docs/chunk-form.md says which is taken when. Native code has first derivatives and
            is mapped by torch.vmap; "torch" has derivatives of any order, which by default it is also taken for where
            torch.func or forward-mode derivatives ask for them.
        state_dtype: torch.float64 computes and returns beliefs in float64, for writes so sure (r² far below P) that
            float32 is too weak; the output keeps the dtype of q, k and v. docs/chunk-form.md has what it costs.
        return_variance: also return the variance of every read.
        return_evidence: also return how expected the writes were.

    A step parameter may also be a number, the same at every token and head. States are float32 at least, also under
    torch.autocast; float64 in any argument makes them float64. The output has the dtype of q, k and v.

    Returns:
        `Filtered`: output, belief, and what else was asked for.

    Raises:
        ValueError: for a bad argument; the message names it, what was expected and what came.
        NotPositiveDefiniteError: if rounding destroyed a covariance; names batch, head, group and position.
        NonFiniteError: if finite inputs overflowed.

    Example:
        >>> design = DesignModel(Identity(), ObserveMemory(), Dense(prior=3.0))
        >>> q, k, v = torch.randn(3, 2, 100, 4, 16).unbind()
        >>> out = filter_sequence(design, q, k, v, process_noise=0.05, write_noise=0.05, return_variance=True)
        >>> out.output.shape, out.belief.covariance.shape, out.variance.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 4, 1, 16, 16]), torch.Size([2, 100, 4, 1]))
    """
    check_way(method, backend)
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"chunk_size: expected a whole number of at least 1, or None, got {chunk_size!r}")
    parameters = {
        "process_noise": process_noise,
        "write_noise": write_noise,
        "prior_variance": prior_variance,
        "log_decay": log_decay,
        "angle": angle,
    }
    inputs = checks.check_inputs(design, q, k, v, parameters, lead="B,T,H", state_dtype=state_dtype)
    if backend == "cpu" and q.device.type != "cpu":
        raise ValueError(f'backend: expected "auto" or "torch" for tensors on {q.device}, got "cpu"')
    if backend == "triton":
        refuse_triton(design, inputs, chunk_size)
    if return_variance and not design.has_variance:
        raise ValueError(
            f"return_variance: expected False for {design.title}, which keeps no covariance (use covariance=Dense() "
            "to have it), got True"
        )
    bounds = [0, q.shape[1]] if cu_seqlens is None else checks.check_cu_seqlens(cu_seqlens, q)
    batch = q.shape[0] if cu_seqlens is None else len(bounds) - 1
    if initial is not None:
        checks.check_belief(design, initial, "initial", batch, q, v.shape[-1])
    given = Given(design, inputs, initial, "initial", definite=True)
    check_before(given)
    if initial is None:
        D, M = q.shape[-1], v.shape[-1]
        initial = Belief.prior(design, batch, q.shape[2], D, M, dtype=inputs.q.dtype, device=q.device)
    else:
        initial, inputs = _in_one_type(initial, inputs)
        given = given._replace(inputs=inputs)

    if backend == "auto" and transforms.beyond_native():
        backend = "torch"
    way = {
        "method": method,
        "backend": backend,
        "chunk_size": chunk_size,
        "return_variance": return_variance,
        "return_evidence": return_evidence,
    }
    with without_autocast(q):
        found = None
        if backend == "fla" or not transforms.active():  # which torch.func does not see through
            found = run_fla(design, initial, inputs, None if cu_seqlens is None else bounds, dtype=q.dtype, **way)
        if found is not None:
            runs = [found]
        elif cu_seqlens is None:
            runs = [run_filter(design, initial, inputs, **way)]
        else:
            runs = run_packed(design, initial, inputs, bounds, **way)
    return _collect(runs, given, q.dtype)


def filter_step(
    design: DesignModel,
    belief: Belief,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    process_noise: Tensor | float | None = None,
    write_noise: Tensor | float | None = None,
    prior_variance: Tensor | float | None = None,
    log_decay: Tensor | float | None = None,
    angle: Tensor | float | None = None,
) -> tuple[Tensor, Belief]:
    r"""One predict, write and read: the decoding step of a design.

    Args:
        design: the assumptions.
        belief: the belief so far, from `filter_sequence`, `filter_step` or `Belief.prior`. Its shapes are checked; that
            its covariance is positive definite is taken on trust, and watched along the key.
        q: the query, [B,H,D].
        k: the write key, [B,H,D].
        v: the written value, [B,H,M].
        process_noise: $\ell_t^2$, [B,H] or a number.
        write_noise: $r_t^2$, [B,H] or [B,H,G] or a number.
        prior_variance: $\lambda_t$, [B,H], or [B,H,M] for `PerColumnReset`, or a number.
        log_decay: [B,H], [B,H,D] or [B,H,D/2], or a number.
        angle: [B,H,D/2] or a number.

    Returns:
        The read-out $y_t$, [B,H,M], in the dtype of q, and the new belief. Where the design keeps a covariance,
        `belief.variance(q)` says how sure the read is.
    """
    parameters = {
        "process_noise": process_noise,
        "write_noise": write_noise,
        "prior_variance": prior_variance,
        "log_decay": log_decay,
        "angle": angle,
    }
    found = native_step(design, belief, q, k, v, parameters)
    if found is not None:
        return found
    inputs = checks.check_inputs(design, q, k, v, parameters, lead="B,H").map(lambda x: x.unsqueeze(1))
    checks.check_belief(design, belief, "belief", q.shape[0], q, v.shape[-1])
    check_before(given := Given(design, inputs, belief, "belief", definite=False))
    belief, inputs = _in_one_type(belief, inputs)
    with without_autocast(q):
        output, belief, precision = run_step(design, belief, inputs)
    output = output.to(q.dtype)
    check_after(given._replace(inputs=inputs), precision, output=output, **_named(belief))
    return output, belief


def check_way(method: str, backend: str, backends: tuple[str, ...] = BACKENDS) -> None:
    """Refuse a method or a backend that does not exist."""
    if method not in ("chunk", "recurrent"):
        raise ValueError(f'method: expected "chunk" or "recurrent", got {method!r}')
    if backend not in backends:
        *first, last = (f'"{name}"' for name in backends)
        raise ValueError(f"backend: expected {', '.join(first)} or {last}, got {backend!r}")


def _in_one_type(belief: Belief, inputs: Inputs) -> tuple[Belief, Inputs]:
    """Belief and inputs in the widest type among them."""
    parts = [x.dtype for x in (*belief, inputs.q) if x is not None]
    dtype = reduce(torch.promote_types, parts)
    return belief.map(lambda x: x.to(dtype)), inputs.map(lambda x: x.to(dtype))


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """States stay in their own type under torch.autocast, which would run their products in half precision."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _named(belief: Belief) -> dict[str, Tensor | None]:
    return {"belief.mean": belief.mean, "belief.covariance": belief.covariance}


def _collect(runs: list[Run], given: Given, dtype: torch.dtype) -> Filtered:
    """Join the runs of packed sequences (or take the one run of a batch), and check what they found."""
    output, precision, variance, write_log_evidence = (
        _joined([getattr(run, name) for run in runs], dim=1)
        for name in ("output", "precision", "variance", "write_log_evidence")
    )
    assert output is not None
    assert precision is not None
    belief = Belief._make(_joined(list(parts), dim=0) for parts in zip(*(run.belief for run in runs), strict=True))
    log_evidence = _joined([run.write_log_evidence.sum(1) for run in runs if run.write_log_evidence is not None], dim=0)
    output = output.to(dtype)
    check_after(given, precision, output=output, **_named(belief), variance=variance, log_evidence=write_log_evidence)
    return Filtered(output, belief, variance, log_evidence, write_log_evidence)


def _joined(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim) if present else None
