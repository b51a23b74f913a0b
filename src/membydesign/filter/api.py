"""The two public functions: `filter_sequence` for training and prefill, `filter_step` for decoding."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from membydesign.filter import checks, loop, sharded, transforms
from membydesign.filter.context import sequence as context
from membydesign.filter.device_checks import Arguments, check_after, check_before, check_sequences_before
from membydesign.filter.inputs import Inputs, Request, Run
from membydesign.filter.kernels import BACKENDS, choose, run_all
from membydesign.filter.native.step import native_step
from membydesign.filter.triton import kernel as triton
from membydesign.state import Sizes, map_state, named_tensors, zip_states

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.context.plan import Stretch


Method = Literal["chunk", "recurrent"]
Backend = Literal["auto", "torch", "native", "triton", "fla"]


class Filtered(NamedTuple):
    r"""What `filter_sequence` returns.

    Attributes:
        output: the read-outs $y_t = M_t^\top q_t$, [B,T,H,M], in the dtype of q, k and v.
        belief: the belief after the last token, one per batch entry, or one per packed sequence.
        variance: $q_t^\top P_t q_t$, the variance of each coordinate of $S_t^\top q_t$, [B,T,H,G] ([B,T,H,M] for
            `PerColumnReset`); None unless requested.
        log_evidence: $\log p(v_{1:T})$, [B,H] ([N,H] packed); None unless requested.
        write_log_evidence: $\log p(v_t \mid v_{<t})$, how expected each write was, [B,T,H]; None unless requested.
    """

    output: Tensor
    belief: Any
    variance: Tensor | None = None
    log_evidence: Tensor | None = None
    write_log_evidence: Tensor | None = None


def filter_sequence(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial: Any = None,
    cu_seqlens: Tensor | None = None,
    method: Method = "chunk",
    chunk_size: int | None = None,
    backend: Backend = "auto",
    state_dtype: torch.dtype | None = None,
    return_variance: bool = False,
    return_evidence: bool = False,
    stretch: Stretch | None = None,
    **step_parameters: Tensor | float | None,
) -> Filtered:
    r"""Run the filter of a design over whole sequences.

    At each token memory drifts, the write $(k_t, v_t)$ is conditioned on, and $y_t = M_t^\top q_t$ is read: the output
    at t sees the write at t. q is not scaled and k is not normalised. Everything is differentiable.

    Args:
        design: the assumptions: any `Design`, such as `catalogue["bayesian_layer"]`.
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        initial: the state to start from, default `design.prior`; one per packed sequence with `cu_seqlens`.
        cu_seqlens: boundaries [N+1] of N sequences packed into one row (B = 1); belief starts afresh at each.
        method: "chunk", many tokens at once, exactly; or "recurrent", the loop over tokens that specifies the filter.
        chunk_size: how many tokens a chunk has; by default a size that suits the design. A larger number than 256
            stands for 256, since work and workspace grow with its square; results differ by rounding alone.
        backend: "torch" for any device, "native" for C on a CPU, "triton" for the GPU kernels of the dense filter,
            "fla" for flash-linear-attention's GPU kernels (designs that keep no covariance); an error says why a
            backend cannot run the design. By default the first of `filter.kernels.KERNELS` that can. Native code has
            first derivatives and is mapped by torch.vmap; "torch" has derivatives of any order, and is the default
            where torch.func or forward-mode derivatives need them.
        state_dtype: torch.float64 computes and returns beliefs in float64, for writes so sure (r² far below P) that
            float32 is too weak; the output keeps the dtype of q, k and v. docs/internals/chunk-form.md says what it
            costs.
        return_variance: also return the variance of every read.
        return_evidence: also return how expected the writes were.
        stretch: for a sequence that is split in time over processes (docs/howto/context-parallel.md): which tokens this
            process holds, from `Stretch.of`. q, k, v, step parameters and results that have an axis T are then those of
            this process's tokens; `initial` is the state before the whole sequence, the same in every process, and the
            belief the one after this process's last token.
        step_parameters: what the design needs at every token and head, by name: `design.step_parameters` lists names,
            shapes and bounds, and `print(design.describe())` shows them with their equations. For the Bayesian Layer
            `process_noise` $\ell_t^2$ [B,T,H], `write_noise` $r_t^2$ [B,T,H] or [B,T,H,G], and `log_decay` [B,T,H,D].
            A number stands for the same value at every token and head.

    DTensors that are sharded over batch or heads, or replicated, are filtered without communication, each shard by its
    process; all arguments must then be DTensors on one mesh, and so are all results. A sum that is pending (Partial) is
    completed first.

    States are float32 at least, also under torch.autocast; float64 in any argument makes them float64. The output has
    the dtype of q, k and v.

    Returns:
        `Filtered`: output, belief, and what else was requested.

    Raises:
        ValueError: for a bad argument; the message names it, what was expected and what was given.
        MemoryError: if native code could not allocate its workspace.
        NotPositiveDefiniteError: if rounding destroyed a covariance; names batch, head, group and position.
        NonFiniteError: if finite inputs overflowed.

    Examples:
        >>> design = DesignModel(Identity(), ObserveMemory(), Dense(prior=3.0))
        >>> q, k, v = torch.randn(3, 2, 100, 4, 16).unbind()
        >>> out = filter_sequence(design, q, k, v, process_noise=0.05, write_noise=0.05, return_variance=True)
        >>> out.output.shape, out.belief.covariance.shape, out.variance.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 4, 1, 16, 16]), torch.Size([2, 100, 4, 1]))
    """
    check_method(method, backend)
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"chunk_size: expected a whole number of at least 1, or None, got {chunk_size!r}")
    if stretch is not None:
        options = {"method": method, "chunk_size": chunk_size, "backend": backend, "state_dtype": state_dtype}
        returns = {"return_variance": return_variance, "return_evidence": return_evidence}
        return _filter_stretch(design, q, k, v, initial, cu_seqlens, stretch, step_parameters, **options, **returns)
    if sharded.any_sharded((q, k, v, *step_parameters.values(), *_tensors(initial))):
        options = {"method": method, "chunk_size": chunk_size, "backend": backend, "state_dtype": state_dtype}
        returns = {"return_variance": return_variance, "return_evidence": return_evidence}
        return _filter_shards(design, q, k, v, initial, cu_seqlens, step_parameters, **options, **returns)
    inputs = checks.check_inputs(design, q, k, v, step_parameters, lead="B,T,H", state_dtype=state_dtype, state=initial)
    if return_variance and not design.has_variance:
        raise ValueError(
            f"return_variance: expected False for {design.title}, which keeps no covariance (use covariance=Dense() "
            "to have it), got True"
        )
    bounds = None if cu_seqlens is None else checks.check_cu_seqlens(cu_seqlens, q)
    batch = q.shape[0] if bounds is None else len(bounds) - 1
    D, M = q.shape[-1], v.shape[-1]
    if initial is not None:
        initial = checks.check_state(design, initial, "initial", batch, q, M)
    arguments = Arguments(design, inputs, initial, "initial", thorough=True)
    check_before(arguments, sequences=False)
    if initial is None:
        initial = design.prior(Sizes(batch, q.shape[2], D, M), dtype=inputs.q.dtype, device=q.device)
    else:
        initial, inputs = _in_one_type(initial, inputs)
        arguments = arguments._replace(inputs=inputs)

    if backend == "auto" and transforms.beyond_native():
        backend = "torch"
    request = Request(inputs, initial, q.dtype, backend, chunk_size, return_variance, return_evidence, bounds)
    with without_autocast(q):
        kernel = choose(design, request, method)
        check_sequences_before(arguments, kernel)
        runs = run_all(design, request, kernel)
    return _collect(runs, arguments, request, state_is_checked=getattr(kernel, "CHECKS_STATE", False))


def filter_step(
    design: Design,
    belief: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **step_parameters: Tensor | float | None,
) -> tuple[Tensor, Any]:
    r"""One predict, write and read: the decoding step of a design.

    Args:
        design: the assumptions.
        belief: the belief so far, from `filter_sequence`, `filter_step` or `Belief.prior`. Its shapes are checked; that
            its covariance is positive definite is taken on trust, and watched along the key.
        q: the query, [B,H,D].
        k: the write key, [B,H,D].
        v: the written value, [B,H,M].
        step_parameters: as for `filter_sequence`, without the axis T: [B,H,...] or a number.

    Returns:
        The read-out $y_t$, [B,H,M], in the dtype of q, and the new belief. Where the design keeps a covariance,
        `belief.variance(q)` says how sure the read is.
    """
    result = native_step(design, belief, q, k, v, step_parameters)
    if result is not None:
        return result
    if sharded.any_sharded((q, k, v, *step_parameters.values(), *_tensors(belief))):
        return _step_shards(design, belief, q, k, v, step_parameters)
    inputs = checks.check_inputs(design, q, k, v, step_parameters, lead="B,H", state=belief)
    inputs = inputs.map(lambda x: x.unsqueeze(1))
    belief = checks.check_state(design, belief, "belief", q.shape[0], q, v.shape[-1])
    check_before(arguments := Arguments(design, inputs, belief, "belief", thorough=False))
    belief, inputs = _in_one_type(belief, inputs)
    with without_autocast(q):
        result = triton.step(design, belief, inputs)
        if result is None:
            written, reading = loop.step(design, belief, inputs, 0)
            precision = None if written.precision is None else written.precision.unsqueeze(1)
            result = reading.mean, written.state, precision
    output, belief, precision = result
    output = output.to(q.dtype)
    results = {"output": output, **dict(named_tensors(belief, "belief"))}
    check_after(arguments._replace(inputs=inputs), precision, results, belief)
    return output, belief


def _tensors(state: Any) -> list[Tensor]:
    return [x for _, x in named_tensors(state)] if isinstance(state, tuple) else []


def _filter_stretch(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Any,
    cu_seqlens: Tensor | None,
    stretch: Stretch,
    step_parameters: dict[str, Any],
    **options: Any,
) -> Filtered:
    """Run `filter_sequence` on this process's tokens, from the belief that the processes before lead to."""
    if cu_seqlens is not None:
        checks.refuse("cu_seqlens", "None with a stretch, which has the boundaries (Stretch.of)", "boundaries")
    own = context.own_of(design, q, k, v, step_parameters, stretch, initial, options["state_dtype"])
    with without_autocast(q):
        entry, exchanged = context.enter(design, own, stretch, options["backend"])
    if stretch.tokens:
        bounds = None if own.bounds is None else torch.tensor(own.bounds, device=q.device)
        starts = own.entered_with(entry) if stretch.enters else own.initial
        out = filter_sequence(design, q, k, v, initial=starts, cu_seqlens=bounds, **options, **step_parameters)
    else:
        out = _empty(design, v, entry if stretch.bounds is None else own.initial, options)
    exchanged = [*exchanged, *context.leave(design, own, out.belief, stretch)]
    return Filtered(*context.tied_results(tuple(out), exchanged))


def _empty(design: Design, v: Tensor, state: Any, options: dict[str, Any]) -> Filtered:
    """Results without tokens, batch entries or heads, with the shapes and types of other processes' results."""
    variance = log_evidence = write_log_evidence = None
    wide, lead = next(x for _, x in named_tensors(state)), v.shape[:3]
    if options["return_variance"]:
        variance = wide.new_zeros((*lead, design.gain_groups(v.shape[-1])))
    if options["return_evidence"]:
        write_log_evidence = wide.new_zeros(lead)
        log_evidence = wide.new_zeros(len(wide), v.shape[2])
    return Filtered(torch.zeros_like(v), state, variance, log_evidence, write_log_evidence)


def _filter_shards(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Any,
    cu_seqlens: Tensor | None,
    step_parameters: dict[str, Any],
    **options: Any,
) -> Filtered:
    """Run `filter_sequence` on the shard of this process."""
    own = sharded.shard(design, q, k, v, initial, "initial", step_parameters, "B,T,H")
    bounds = sharded.plain_bounds(cu_seqlens, own.layout)
    B, _, H, D = q.shape
    sizes = Sizes(B if bounds is None else len(bounds) - 1, H, D, v.shape[-1])
    if own.empty:
        empty = _empty(design, own.v, sharded.empty_state(design, own, options["state_dtype"]), options)
        out = map_state(own.connected, empty)
    else:
        own_options = {**options, **own.parameters, "initial": own.state, "cu_seqlens": bounds}
        out = sharded.run(own, lambda: filter_sequence(design, own.q, own.k, own.v, **own_options))
    whole, lead = own.layout.whole, q.shape[:3]
    return Filtered(
        whole(out.output, v.shape, 2),
        sharded.whole_state(design, own, out.belief, sizes),
        None if out.variance is None else whole(out.variance, torch.Size((*lead, out.variance.shape[-1])), 2),
        None if out.log_evidence is None else whole(out.log_evidence, torch.Size(sizes[:2]), 1),
        None if out.write_log_evidence is None else whole(out.write_log_evidence, lead, 2),
    )


def _step_shards(
    design: Design, belief: Any, q: Tensor, k: Tensor, v: Tensor, step_parameters: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Run `filter_step` on the shard of this process."""
    own = sharded.shard(design, q, k, v, belief, "belief", step_parameters, "B,H")
    if own.empty:
        y, state = own.connected(own.v), sharded.empty_state(design, own)
    else:
        y, state = sharded.run(own, lambda: filter_step(design, own.state, own.q, own.k, own.v, **own.parameters))
    B, H, D = q.shape
    sizes = Sizes(B, H, D, v.shape[-1])
    return own.layout.whole(y, v.shape, 1), sharded.whole_state(design, own, state, sizes)


def check_method(method: str, backend: str) -> None:
    """Refuse a method or a backend that does not exist."""
    if method not in ("chunk", "recurrent"):
        raise ValueError(f'method: expected "chunk" or "recurrent", got {method!r}')
    if backend not in BACKENDS:
        *first, last = (f'"{name}"' for name in BACKENDS)
        raise ValueError(f"backend: expected {', '.join(first)} or {last}, got {backend!r}")


def _in_one_type(state: tuple, inputs: Inputs) -> tuple[Any, Inputs]:
    """State and inputs in the widest type among them."""
    dtype = reduce(torch.promote_types, [inputs.q.dtype, *(x.dtype for _, x in named_tensors(state))])
    return map_state(lambda x: x.to(dtype), state), inputs.map(lambda x: x.to(dtype))


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """States stay in their own type under torch.autocast, which would run their products in half precision."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _collect(runs: list[Run], arguments: Arguments, request: Request, *, state_is_checked: bool) -> Filtered:
    """Join the runs of packed sequences (or take the one run of a batch), and check their results."""
    outputs, states, precisions, variances, evidences, _ = zip(*runs, strict=True)
    output = _joined(outputs)
    assert output is not None
    output = output.to(request.dtype)
    precision = _joined(precisions)
    variance = _joined(variances) if request.return_variance else None
    write_log_evidence = log_evidence = None
    if request.return_evidence:
        write_log_evidence = _joined(evidences)
        log_evidence = torch.cat([evidence.sum(1) for evidence in evidences])
    state = states[0] if len(states) == 1 else zip_states(lambda parts: torch.cat(list(parts)), states)
    results: dict[str, Tensor | None] = {"output": output, **dict(named_tensors(state, "belief"))}
    results |= {"variance": variance, "log_evidence": write_log_evidence}
    check_after(arguments, precision, results, None if state_is_checked else state)
    return Filtered(output, state, variance, log_evidence, write_log_evidence)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present, 1) if len(present) > 1 else present[0] if present else None
