"""Filter a case with the library, as a user would."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import membydesign as mbd
from fuzzing.specs import build

if TYPE_CHECKING:
    from fuzzing.cases import Case, Problem


class Outcome(NamedTuple):
    """Results by name, [B,T,H,...] or [B,H,...], and gradients by the name of the argument.

    Those of the reference have an axis of replicas in front. There are no gradients if nothing was differentiated.
    """

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]


def working_dtype(case: Case, problem: Problem) -> torch.dtype:
    """The type of states: the widest of all arguments, and float32 at least."""
    types = [x.dtype for x in (*problem.tensors.values(), *problem.initial.values()) if isinstance(x, Tensor)]
    return reduce(torch.promote_types, [*types, torch.float32, case.state_dtype or torch.float32])


def weights_of(case: Case, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of each differentiated result, in the type of the result."""
    generator = torch.Generator().manual_seed(case.random("weights").getrandbits(60))
    weights = {}
    for name, x in results.items():
        w = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        if case.target in (name, "everything"):
            weights[name] = w
    return weights


def run_library(case: Case, problem: Problem) -> Outcome:
    """What `filter_sequence` or `filter_step` computes."""
    leaves = {name: x for name, x in problem.tensors.items() if isinstance(x, Tensor)}
    leaves |= {f"initial {name}": x for name, x in problem.initial.items()}
    if case.target is not None:
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    tensors = {name: leaves.get(name, x) for name, x in problem.tensors.items()}
    design = build(case.spec)
    initial = None
    if problem.initial:
        parts = [leaves[f"initial {name}"] for name in problem.initial]
        form = design.prior(mbd.Sizes(1, 1, case.sizes[3], case.sizes[4]), dtype=torch.float32, device="meta")
        initial = _as_state(form, parts)
    before = torch.get_num_threads()
    torch.set_num_threads(case.options["threads"])
    try:
        with torch.set_grad_enabled(case.target is not None):
            results = _steps(case, design, tensors, initial) if case.mode == "steps" else None
            results = results or _sequence(case, problem, design, tensors, initial)
            weights = {name: w for name, w in weights_of(case, results).items() if results[name].requires_grad}
            gradients: dict[str, Tensor] = {}
            if weights:
                grads = torch.autograd.grad(
                    [results[name] for name in weights],
                    list(leaves.values()),
                    list(weights.values()),
                    allow_unused=True,
                )
                gradients = {
                    name: torch.zeros_like(x) if grad is None else grad
                    for (name, x), grad in zip(leaves.items(), grads, strict=True)
                }
    finally:
        torch.set_num_threads(before)
    return Outcome({name: x.detach() for name, x in results.items()}, gradients)


def _sequence(
    case: Case, problem: Problem, design: Any, tensors: dict[str, Tensor | float], state: Any
) -> dict[str, Tensor]:
    """All parts of a sequence, each resumed from the one before."""
    B, T, H, _, _ = case.sizes
    cuts = case.options.get("cuts", [0, T])
    parts = []
    for (start, end), options in zip(pairwise(cuts), case.options["calls"], strict=True):
        now = {name: between(x, B, T, H, start, end) for name, x in tensors.items()}
        if problem.segments is not None:
            options = {**options, "cu_seqlens": torch.tensor(problem.segments, dtype=torch.int32)}
        asked = {"return_variance": case.spec.has_variance, "return_evidence": True, "state_dtype": case.state_dtype}
        out = _filter(design, now, {**options, **asked, "initial": state})
        state = out.belief
        parts.append(out)
    results = {"output": torch.cat([out.output for out in parts], 1), **_state(state)}
    results["evidence"] = torch.cat([out.write_log_evidence for out in parts], 1)
    if case.spec.has_variance:
        results["variance"] = torch.cat([out.variance for out in parts], 1)
    results["total evidence"] = torch.stack([out.log_evidence for out in parts]).sum(0)
    return results


def _filter(design: Any, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """`filter_sequence`, by any backend if the one drawn has no kernel for this design."""
    try:
        return mbd.filter_sequence(design, **tensors, **options)
    except ValueError as error:
        if not str(error).startswith("backend: expected"):
            raise
    return mbd.filter_sequence(design, **tensors, **{**options, "backend": "auto"})


def _steps(case: Case, design: Any, tensors: dict[str, Tensor | float], state: Any) -> dict[str, Tensor]:
    """Token by token, as in decoding."""
    B, T, H, D, M = case.sizes
    if state is None:
        q = tensors["q"]
        assert isinstance(q, Tensor)
        dtype = reduce(
            torch.promote_types,
            [x.dtype for x in tensors.values() if isinstance(x, Tensor)],
            torch.promote_types(q.dtype, torch.float32),
        )
        state = design.prior(mbd.Sizes(B, H, D, M), dtype=dtype, device="cpu")
    outputs = []
    for t in range(T):
        now = {
            name: x[:, t] if isinstance(x, Tensor) and x.shape[:3] == (B, T, H) and x.ndim >= 3 else x
            for name, x in tensors.items()
        }
        output, state = mbd.filter_step(design, state, **now)  # pyright: ignore[reportArgumentType]
        outputs.append(output)
    return {"output": torch.stack(outputs, 1), **_state(state)}


def between(x: Tensor | float, B: int, T: int, H: int, start: int, end: int) -> Tensor | float:
    """Tokens start to end − 1 of an argument that has tokens."""
    return x[:, start:end] if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[:3] == (B, T, H) else x


def _as_state(form: Any, parts: list[Any]) -> Any:
    """A state of a form from its parts: mean and kept, then those of an unknown scale."""
    if isinstance(form, mbd.ScaledBelief):
        return mbd.ScaledBelief(type(form.base)(*parts[:-2]), *parts[-2:])
    return type(form)(*parts)


def _state(state: Any) -> dict[str, Tensor]:
    if isinstance(state, mbd.ScaledBelief):
        return {**_state(state.base), "shape": state.shape, "rate": state.rate}
    mean, kept = state
    return {"mean": mean} if kept is None else {"mean": mean, "kept": kept}
