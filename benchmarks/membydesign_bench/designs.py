"""Time every design of the catalogue that has a kernel of its own against the design that it extends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from membydesign.design import Block, DesignModel, catalogue
from membydesign.filter import filter_sequence, loop
from membydesign.filter.kernels import why_not_each
from membydesign_bench.problem import Problem, Size
from membydesign_bench.timing import Job, Row, Settings, interleaved
from membydesign_bench.works import TRAINING, Task, Work, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from membydesign.design import Design, StepParameter

SIZES = (Size(1, 4, 2048, 64), Size(1, 4, 2048, 128))
LARGE = Size(1, 4, 2048, 256)
STRUCTURED = ("block_32", "low_rank")
"""What is also timed with large keys, for which these covariances are made."""

RANGES = {"<= 0": (-0.1, 0.0), "[0, 1]": (0.05, 0.95), "> 0": (0.1, 1.1), ">= 0": (0.1, 1.1), "finite": (-0.1, 0.1)}
"""Between which numbers step parameters are drawn, by their bound, unless `Problem` has them by name."""


def rows() -> dict[str, Design]:
    """Return the designs by name: the catalogue's, and a block size for large keys."""
    block = catalogue["block_diagonal"]
    assert isinstance(block, DesignModel)
    return {
        **catalogue,
        "block_32": block.replace(covariance=Block(32), title="Block-diagonal covariance, blocks of 32"),
    }


def compared(D: int) -> dict[str, str]:
    """Return each design that has a kernel other than the loop, and the design that it is compared with."""
    fast = {}
    for name, design in rows().items():
        reasons = why_not_each(design, D, D)
        if any(reason is None for kernel, reason in reasons.items() if kernel != loop.NAME):
            fast[name] = reference(design)
    return {name: reference for name, reference in fast.items() if name != reference}


def reference(design: Design) -> str:
    """Return what a design is compared with: the dense covariance, or for sums over slots linear attention."""
    return "bayesian_layer" if design.has_variance and design.key_bound == "finite" else "linear_attention"


def work(name: str) -> Work:
    """Return a design of `rows` as something to time."""
    design = rows()[name]

    def inputs(problem: Problem) -> dict[str, Tensor]:
        q, k, v = problem.q, problem.k, problem.v
        if design.key_bound != "finite":
            q, k = q.softmax(-1), k.softmax(-1)
        v = design.layer_values(v)
        parameters = {p.name: _parameter(p, design, problem) for p in design.step_parameters}
        return {"q": q, "k": k, "v": v, **parameters}

    return Work(design.title, inputs, lambda **x: filter_sequence(design, **x).output)


def _parameter(parameter: StepParameter, design: Design, problem: Problem) -> Tensor:
    B, H, T, D = problem.size
    sizes = parameter.sizes(D, D, design.groups)
    known = getattr(problem, parameter.name, None)
    if isinstance(known, torch.Tensor):
        return known[(..., *(None for _ in sizes))].expand(B, T, H, *sizes).contiguous()
    low, high = RANGES[parameter.bound]
    generator = torch.Generator().manual_seed(4)
    return low + (high - low) * torch.rand(B, T, H, *sizes, generator=generator)


def designs(settings: Settings) -> Iterator[Job]:
    """Compare Gaussian designs that have a variance with the Bayesian Layer, and the others with linear attention."""
    cases = [(size, tuple(compared(size.D))) for size in settings.sizes or SIZES]
    if not settings.sizes:
        cases.append((LARGE, STRUCTURED))
    for task in TRAINING:
        for size, names in cases:
            for name in names:
                yield Job(f"{task} at {size}: {name}", partial(_designs, task, size, name, settings))


def _designs(task: Task, size: Size, name: str, settings: Settings) -> list[Row]:
    other = reference(rows()[name])
    ready = {each: prepare(work(each), task, size, settings.device) for each in (name, other)}
    times = interleaved(ready, settings.rounds, settings.device)
    return [Row("designs", task, str(size), name, times[name], "ms", other, times[other])]
