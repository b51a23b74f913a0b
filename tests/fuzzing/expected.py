"""Filter a case with the reference: bring its arguments to float64, and its results to the library's shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fuzzing import reference
from fuzzing.running import Outcome, weights_of, working_dtype
from fuzzing.specs import SCALE

if TYPE_CHECKING:
    from fuzzing.cases import Case, Problem
    from fuzzing.specs import Spec

REPLICAS = 4
"""The reference itself, and three more with rounding errors."""


class Expected(NamedTuple):
    """What the reference computed.

    Attributes:
        results: by name, in the library's shapes after an axis of replicas.
        leaves: the arguments in float64, to differentiate by.
        trust: β r² of every write, which is 1/(1 + kᵀP̄k/r²), of designs that have it.
        passed: all means and covariances on the way that depend on the leaves.
        covariances: all matrices that are kept on the way.
    """

    results: dict[str, Tensor]
    leaves: dict[str, Tensor]
    trust: Tensor | None
    passed: list[Tensor]
    covariances: list[Tensor]

    def differentiated(self, case: Case, library: Outcome) -> Outcome:
        """The results, with the gradients of those that were differentiated in the library.

        `flow` is the sum of |x dx| over all means and covariances x on the way, [H]: how much there is to
        differentiate, however little of it a decay lets pass.
        """
        detached = {name: x.detach() for name, x in self.results.items()}
        # in the order of the library's results, which decides what weights each has
        weights = weights_of(case, library.results)
        weights = {name: w for name, w in weights.items() if self.results[name].requires_grad}
        if not weights:
            return Outcome(detached, {})
        grads = torch.autograd.grad(
            [self.results[name] for name in weights],
            [*self.leaves.values(), *self.passed],
            [w.double().expand_as(self.results[name]) for name, w in weights.items()],
            allow_unused=True,
        )
        gradients = {
            name: torch.zeros_like(x) if grad is None else grad
            for (name, x), grad in zip(self.leaves.items(), grads[: len(self.leaves)], strict=True)
        }
        flow = torch.zeros(())
        for x, grad in zip(self.passed, grads[len(self.leaves) :], strict=True):
            flow = flow if grad is None else flow + (x.detach() * grad)[0].abs().flatten(2).sum((0, 2))
        return Outcome(detached, {**gradients, "flow": flow})


def run_reference(case: Case, problem: Problem) -> Expected:
    """All results of the reference."""
    B, T, H, D, M = case.sizes
    largest = B * H * D * max(D * case.spec.variances(M), M)  # of all intermediate results
    # torch's special functions are exact to a few roundings
    eps = torch.finfo(working_dtype(case, problem)).eps * (4 if case.spec.write == "count" else 1)
    seed = case.random("rounding").getrandbits(60)
    rounded = reference.Rounding(REPLICAS, eps, seed, 2 * largest + 64, chunked=case.chunked)

    def replicated(x: Tensor) -> Tensor:
        x = x.detach().resolve_neg().double()
        return x.expand(REPLICAS, *x.shape).clone().requires_grad_(case.target is not None)

    leaves = {name: replicated(x) for name, x in problem.tensors.items() if isinstance(x, Tensor)}
    leaves |= {f"initial {name}": replicated(x) for name, x in problem.initial.items()}
    axes = {"q": (D,), "k": (D,), "v": (M,), **case.spec.parameters(D, M)}
    x = {name: _expanded(leaves.get(name, given), (B, T, H), axes[name]) for name, given in problem.tensors.items()}
    bounds = problem.segments
    state, passed = _initial_state(case, leaves, len(bounds) - 1 if bounds else B), []
    with torch.set_grad_enabled(case.target is not None):
        if bounds is None:
            results, state = reference.run(case.spec, x, state, rounded, passed)
        else:
            results, state = _each_segment(case.spec, x, state, bounds, rounded, passed)
        results["mean"] = state.mean
        if state.kept is not None:
            results["kept"] = _as_kept(case.spec, state.kept)
        if state.scale is not None:
            results["shape"], results["rate"] = state.scale
        results["total evidence"] = _sums(results["evidence"], bounds)
    trust = results.pop("trust", None)
    followed = [part for part in passed if part.requires_grad]
    matrix = case.spec.keeps_matrix or case.spec.has_blocks
    matrices = [part.detach() for part in passed if matrix and part.ndim == 6]
    return Expected(results, leaves, None if trust is None else trust.detach(), followed, matrices)


def _each_segment(
    spec: Spec,
    x: dict[str, Tensor],
    state: reference.State,
    bounds: list[int],
    rounded: reference.Rounding,
    passed: list[Tensor],
) -> tuple[dict[str, Tensor], reference.State]:
    """Packed sequences: each from a state of its own."""
    runs = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        kept = None if state.kept is None else state.kept[:, n : n + 1]
        scale = None if state.scale is None else (state.scale[0][:, n : n + 1], state.scale[1][:, n : n + 1])
        own = {name: part[:, :, start:end] for name, part in x.items()}
        first = reference.State(state.mean[:, n : n + 1], kept, scale=scale)
        runs.append(reference.run(spec, own, first, rounded, passed))
    every = [results for results, _ in runs if results]
    results = {name: torch.cat([results[name] for results in every], 2) for name in every[0]}
    kept = [last.kept for _, last in runs if last.kept is not None]
    mean = torch.cat([last.mean for _, last in runs], 1)
    scales = [last.scale for _, last in runs if last.scale is not None]
    scale = (torch.cat([a for a, _ in scales], 1), torch.cat([b for _, b in scales], 1)) if scales else None
    return results, reference.State(mean, torch.cat(kept, 1) if kept else None, scale=scale)


def _expanded(x: Tensor | float, lead: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """A leaf with all its axes, [N,B,T,H,...]."""
    shape = (REPLICAS, *lead, *sizes)
    if not isinstance(x, Tensor):
        return torch.full(shape, float(x), dtype=torch.float64)
    if x.ndim == 1:
        return x.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    return x.reshape(*x.shape, *[1] * (len(shape) - x.ndim)).expand(shape)


def _initial_state(case: Case, leaves: dict[str, Tensor], B: int) -> reference.State:
    _, _, H, D, M = case.sizes
    spec = case.spec
    if spec.kept == "counts":
        events = torch.full((REPLICAS, B, H, D, M), spec.prior, dtype=torch.float64)
        return reference.State(events, events[..., 0].clone())
    scale = None
    if spec.scaled:
        parts = zip(("shape", "rate"), SCALE, strict=True)
        start = [leaves.get(f"initial {name}", torch.full((), x).double()) for name, x in parts]
        scale = (start[0].expand(REPLICAS, B, H, spec.groups), start[1].expand(REPLICAS, B, H, spec.groups))
    mean = leaves.get("initial mean", torch.zeros(REPLICAS, B, H, D, M, dtype=torch.float64))
    if spec.kept in ("reset", "column_reset", "nothing"):
        return reference.State(mean, None)
    kept = leaves.get("initial kept")
    if kept is None:
        matrix = spec.prior * torch.eye(D, dtype=torch.float64)
        kept = matrix.expand(REPLICAS, B, H, spec.groups, D, D).clone()
    elif spec.kept == "diagonal":
        kept = torch.diag_embed(kept)
    elif spec.has_blocks:
        blocks = torch.zeros(*kept.shape[:-3], D, D, dtype=torch.float64)
        for i in range(D // spec.size):
            rows = slice(i * spec.size, (i + 1) * spec.size)
            blocks[..., rows, rows] = kept[..., i, :, :]
        kept = blocks
    return reference.State(mean, kept, scale=scale)


def _as_kept(spec: Spec, matrices: Tensor) -> Tensor:
    """What is kept of P in the library's form."""
    match spec.kept:
        case "diagonal":
            return matrices.diagonal(dim1=-2, dim2=-1)
        case "block" | "example_block":
            n = matrices.shape[-1] // spec.size
            rows = [slice(i * spec.size, (i + 1) * spec.size) for i in range(n)]
            return torch.stack([matrices[..., r, r] for r in rows], -3)
        case _:
            return matrices


def _sums(evidence: Tensor, segments: list[int] | None) -> Tensor:
    """log p of each sequence, [N,B,H], from that of its writes, [N,B,T,H]."""
    if segments is None:
        return evidence.sum(2)
    return torch.cat([evidence[:, :, start:end].sum(2) for start, end in pairwise(segments)], 1)
