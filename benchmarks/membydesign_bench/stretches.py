"""How much longer a process computes in a scan over processes than in a plain filter: `COST_OF_SCAN`.

    python -m membydesign_bench.stretches

CPU time on one thread, medians of five, of the maps of a stretch and of the filter, forward and with backward. Nothing
is sent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from membydesign import catalogue
from membydesign.filter.context.sequence import Probe
from membydesign.filter.inputs import Inputs
from membydesign.testing import random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("bayesian_layer", "stationary_bayesian_layer", "partial_reset", "gated_deltanet", "kda", "gla", "mamba2")
SIZES = ((64, 2048), (128, 1024))
ROUNDS = 5


def seconds(f: Callable[[], Any]) -> float:
    """The median CPU time of a call, after one that does not count."""
    f()
    every = []
    for _ in range(ROUNDS):
        start = time.process_time()
        f()
        every.append(time.process_time() - start)
    return sorted(every)[ROUNDS // 2]


def ratios(name: str, D: int, T: int) -> tuple[float, float]:
    """The time of maps and filter compared with that of the filter: forward, and with backward."""
    design = catalogue[name]
    passages = design.passages()
    assert not isinstance(passages, str)
    problem = random_problem(design, B=1, T=T, H=2, D=D, M=D, dtype=torch.float32)
    x, start = Inputs(problem.q, problem.k, problem.v, problem.parameters), problem.prior()
    leaves = [*x.named().values()]
    for leaf in leaves:
        leaf.requires_grad_()

    def plain() -> torch.Tensor:
        return problem.filter().output.sum()

    def maps() -> torch.Tensor:
        elements = [passage.element(design, x, start, Probe("auto")) for passage in passages]
        return torch.stack([part.sum() for element in elements for part in element]).sum()

    def gradients(f: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(f(), leaves, allow_unused=True)

    forward = 1 + seconds(maps) / seconds(plain)
    return forward, 1 + seconds(gradients(maps)) / seconds(gradients(plain))


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("| design | D | T | forward | forward and backward |\n|---|---|---|---|---|")
    for name in NAMES:
        for D, T in SIZES:
            forward, both = ratios(name, D, T)
            print(f"| `{name}` | {D} | {T:,} | {forward:.1f} | {both:.1f} |", flush=True)


if __name__ == "__main__":
    main()
