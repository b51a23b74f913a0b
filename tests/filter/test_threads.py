"""Threads that share a head compute what one thread computes, to the last bit."""

import pytest
import torch

import membydesign as mbd
from membydesign.testing import random_problem

DESIGNS = {
    "gated_deltanet": mbd.catalogue["gated_deltanet"],
    "kda": mbd.catalogue["kda"],
    "linear_attention": mbd.catalogue["linear_attention"],
    "rotating reset": mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(), mbd.Reset()),
    "bayesian_layer": mbd.catalogue["bayesian_layer"],
    "row decays": mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), mbd.Dense()),
    "stationary": mbd.catalogue["stationary_bayesian_layer"],
    "rotating dense": mbd.DesignModel(mbd.DampedRotation(noise="real"), mbd.ObserveMemory(), mbd.Dense()),
    "noise groups": mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(groups=2), mbd.Dense()),
}
SIZES = ((1, 440, 1, 66, 130), (1, 300, 2, 100, 96))
"""B, T, H, D, M: large enough to be shared, and no multiples of a tile of columns, or of a chunk."""


@pytest.fixture(autouse=True)
def _threads():
    yield
    torch.set_num_threads(1)


def results(problem, threads, **options):
    """Every output and every gradient, computed by so many threads."""
    torch.set_num_threads(threads)
    leaves = []

    def leaf(x):
        leaves.append(x.clone().requires_grad_())
        return leaves[-1]

    evidence = problem.design.keeps_covariance
    options = options or {"backend": "native"}
    out = problem.map(leaf).filter(return_variance=evidence, return_evidence=evidence, **options)
    parts = [out.output, *[x for x in out.belief if x is not None]]
    if evidence:
        parts += [out.variance, out.log_evidence]
    weights = torch.Generator().manual_seed(1)
    loss = torch.stack([(x * torch.randn(x.shape, dtype=x.dtype, generator=weights)).sum() for x in parts]).sum()
    return [*parts, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DESIGNS)
def test_same_numbers_from_any_number_of_threads(name, dtype):
    for B, T, H, D, M in SIZES:
        problem = random_problem(DESIGNS[name], B=B, T=T, H=H, D=D, M=M, dtype=dtype)
        alone = results(problem, 1)
        for threads in (2, 3, 8):
            for part, (one, many) in enumerate(zip(alone, results(problem, threads), strict=True)):
                assert torch.equal(one, many), f"part {part} of {len(alone)} on {threads} threads"


def test_threads_agree_with_the_loop():
    problem = random_problem(DESIGNS["bayesian_layer"], B=1, T=200, H=1, D=66, M=130)
    loop = results(problem, 1, method="recurrent")
    for one, many in zip(loop, results(problem, 2), strict=True):
        torch.testing.assert_close(many, one, rtol=1e-9, atol=1e-9)


def test_sure_writes_in_double_on_any_number_of_threads():
    problem = random_problem(DESIGNS["bayesian_layer"], B=1, T=300, H=1, D=96, M=96, dtype=torch.float32)
    problem.parameters["write_noise"].fill_(1e-3)
    for one, many in zip(results(problem, 1), results(problem, 2), strict=True):
        assert torch.equal(one, many)
