"""The native mean pass where several tokens share a pass over the mean: large keys, and odd lengths and sizes."""

from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign import DesignModel, catalogue
from membydesign.filter.native import mean_pass
from membydesign.testing import assert_close, random_problem
from problems import TRANSITIONS

LARGE = mean_pass.BY_GROUP
WAYS: tuple[dict[str, Any], ...] = ({"backend": "native"}, {"method": "recurrent"})
RULES = {
    "reset": (mbd.ObserveMemory(), mbd.Reset()),
    "two_groups": (mbd.ObserveMemory(groups=2), mbd.Reset()),
    "per_column": (mbd.ObserveMemory(), mbd.PerColumnReset()),
    "additive": (mbd.LatentInput(), mbd.MeanOnly()),
}


@pytest.mark.parametrize("T", [1, 3, 4, 70])
@pytest.mark.parametrize("drift", ["identity", "scalar", "diagonal"])
@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_loop(rule, drift, T):
    design = DesignModel(TRANSITIONS[drift], *RULES[rule])
    for D, M in ((LARGE, 8), (LARGE + 3, 34)):
        problem = random_problem(design, T=T, B=1, H=2, D=D, M=M)
        asked = design.write.observes_memory
        ours, loop = (problem.filter(return_evidence=asked, **way) for way in WAYS)
        assert_close(ours.output, loop.output, 1e-12)
        assert_close(ours.belief.mean, loop.belief.mean, 1e-12)
        if asked:
            assert_close(ours.write_log_evidence, loop.write_log_evidence, 1e-11)


@pytest.mark.parametrize("name", ["kda", "gla"])
def test_gradients_are_those_of_the_loop(name):
    problem = random_problem(catalogue[name], T=37, B=1, H=2, D=LARGE, M=24)
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters}
    grads = []
    for way in WAYS:
        leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
        out = mbd.filter_sequence(problem.design, **leaves, **way)
        weights = torch.linspace(-1, 1, out.output.numel(), dtype=torch.float64).view_as(out.output)
        grads.append(torch.autograd.grad((out.output * weights).sum() + out.belief.mean.sum(), list(leaves.values())))
    for key, ours, theirs in zip(inputs, *grads, strict=True):
        assert_close(ours, theirs, 1e-10, key)


def test_threads_share_a_head():
    problem = random_problem(catalogue["kda"], T=70, B=1, H=1, D=LARGE, M=200, dtype=torch.float32)
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(problem.filter(backend="native").output)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)
