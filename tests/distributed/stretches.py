"""Filters whose tokens are split over processes, compared with one process: what the checks of stretches share."""

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

import membydesign as mbd
from membydesign.state import map_state, named_tensors
from membydesign.testing import Problem, random_problem


def own_part(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """This process's tokens of x, [B,T,...]."""
    bounds = [0, *accumulate(lengths)]
    rank = dist.get_rank()
    return x[:, bounds[rank] : bounds[rank + 1]]


def weighted(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A loss of x with the same weights in every process; `like` are those weights' entries."""
    return (x * like.to(x.dtype)).sum()


def weights_of(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(x: torch.Tensor, y: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest difference, compared with the largest number (at least 1)."""
    if y.numel():
        error = (x.double() - y.double()).abs().max().item() / max(1.0, y.abs().max().item())
        assert error <= tolerance, f"{what}: {error:.2e}"


def compared(
    design: mbd.Design,
    lengths: tuple[int, ...],
    schedule: Any,
    *,
    cu_seqlens: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    variance: bool = True,
    problem: Problem | None = None,
    **sizes: Any,
) -> None:
    """Outputs, beliefs, variance, evidence and all gradients are those of one process."""
    T = sum(lengths)
    B = 2 if cu_seqlens is None else 1
    problem = problem or random_problem(design, T=T, B=B, dtype=dtype, **sizes)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    before = random_problem(design, T=3, B=N, seed=1, dtype=dtype, **sizes)
    initial = map_state(lambda x: x.detach().to(dtype), before.filter().belief)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    leaves = [problem.q, problem.k, problem.v, *problem.parameters.values(), *(x for _, x in named_tensors(initial))]
    for x in leaves:
        x.requires_grad_()
    requests = {"return_variance": variance and design.has_variance, "return_evidence": True}

    expected: Any = problem.filter(initial=initial, cu_seqlens=bounds, **requests)
    tokens = {name: getattr(expected, name) for name in ("output", "variance", "write_log_evidence")}
    weights = {name: weights_of(x, i) for i, (name, x) in enumerate(tokens.items()) if x is not None}
    of_belief = [weights_of(x, 10 + i) for i, (_, x) in enumerate(named_tensors(expected.belief))]
    loss: Any = sum(weighted(tokens[name], weight) for name, weight in weights.items())
    loss = loss + expected.log_evidence.sum()
    for (_, x), weight in zip(named_tensors(expected.belief), of_belief, strict=True):
        loss = loss + weighted(x, weight)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)

    own = problem.map(lambda x: own_part(x, lengths))
    stretch: Any = mbd.Stretch.of(own.q, cu_seqlens=bounds, schedule=schedule)
    assert stretch.lengths == lengths
    out: Any = own.filter(initial=initial, stretch=stretch, **requests)
    name = f"{design.title}, {schedule}, {lengths}"
    parts = []
    for key, weight in weights.items():
        close(getattr(out, key), own_part(tokens[key], lengths), tolerance, f"{name}: {key}")
        parts.append(weighted(getattr(out, key), own_part(weight, lengths)))
    total = out.log_evidence.sum()
    parts.append(total)
    total = total.detach().clone()
    dist.all_reduce(total)
    close(total, expected.log_evidence.sum(), tolerance, f"{name}: log_evidence")
    if cu_seqlens is None:
        last = stretch.last(out.belief)
        pairs = zip(named_tensors(last), named_tensors(expected.belief), of_belief, strict=True)
        for (key, x), (_, y), weight in pairs:
            close(x, y, tolerance, f"{name}: belief.{key}")
            parts.append(weighted(x, weight) / stretch.size)
    else:
        ends = [n for n, (a, b) in enumerate(pairwise(cu_seqlens)) if stretch.start < b <= stretch.end and a < b]
        here = [n - stretch.sequences.start for n in ends]
        pairs = zip(named_tensors(out.belief), named_tensors(expected.belief), of_belief, strict=True)
        for (key, x), (_, y), weight in pairs:
            close(x[here], y[ends], tolerance, f"{name}: belief.{key}")
            parts.append(weighted(x[here], weight[ends]))
    own_loss = sum(parts[1:], parts[0])
    found = torch.autograd.grad(own_loss, leaves, allow_unused=True)
    for i, (x, g, y) in enumerate(zip(leaves, found, gradients, strict=True)):
        mine = torch.zeros_like(x) if g is None else g.contiguous()
        dist.all_reduce(mine)
        close(mine, torch.zeros_like(x) if y is None else y, tolerance, f"{name}: gradient {i}")
