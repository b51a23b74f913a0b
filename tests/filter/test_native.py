"""Native code: as torch operators, compiled once, safely, and never missed."""

import os
import subprocess
import sys

import pytest
import torch

import membydesign as mbd
from membydesign.filter.native import compiled
from problems import DESIGNS, random_problem

PROGRAM = """
import torch, membydesign as mbd
design = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(), mbd.Dense())
torch.manual_seed(0)
x = torch.randn(1, 40, 2, 8)
out = mbd.filter_sequence(design, x, x, x, log_decay=-0.1, process_noise=0.1, write_noise=0.1)
print(f"{out.output.sum().item():.4f}")
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def kalman_arguments(design_name: str, *, by_token: bool, train: bool):
    """What the operator of the dense filter takes, for a small problem."""
    problem = random_problem(DESIGNS[design_name], B=1, T=18, H=2, D=4, M=4)
    step = problem.parameters
    mean, covariance = torch.zeros(1, 2, 1, 4, 4), torch.eye(4).expand(1, 2, 1, 4, 4)
    tensors = [problem.q, problem.k, problem.v, step["process_noise"], step["write_noise"], step["log_decay"]]
    leaves = prepared([*tensors, step.get("angle"), torch.ones(4), mean, covariance], train, constant=7)
    return (*leaves, 8, by_token, False, True, True, train)


def mean_pass_arguments(design_name: str, *, additive: bool, train: bool):
    """What the operator of the mean given gains takes, for a small problem."""
    problem = random_problem(DESIGNS[design_name], B=1, T=18, H=2, D=4, M=4)
    step = problem.parameters
    tensors = [problem.q, None if additive else problem.k, problem.v, problem.k, torch.rand(1, 18, 2, 2)]
    leaves = prepared([*tensors, step["log_decay"], step.get("angle"), torch.zeros(1, 2, 4, 4)], train)
    by_token = step.get("angle") is None
    return (*leaves, 8, by_token, True, train)


def diagonal_arguments(design_name: str, *, train: bool):
    """What the operator of the diagonal covariance takes, for a small problem."""
    problem = random_problem(DESIGNS[design_name], B=1, T=18, H=2, D=4, M=4)
    step = problem.parameters
    tensors = [problem.k, step["process_noise"], step["write_noise"], step["log_decay"], step.get("angle")]
    leaves = prepared([*tensors, torch.ones(4), torch.ones(1, 2, 2, 4)], train, constant=5)
    return (*leaves, False, train)


def prepared(tensors, train, constant=None):
    tensors = [None if x is None else x.double().contiguous() for x in tensors]
    return [x if x is None or i == constant else x.clone().requires_grad_(train) for i, x in enumerate(tensors)]


@pytest.mark.parametrize("name", ["dense-diagonal", "dense-rotation"])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_opcheck_of_the_dense_filter(name, by_token, train):
    """Schema, fake tensors, autograd registration and tracing, as torch itself checks an operator."""
    torch.library.opcheck(compiled.OPERATORS["kalman"], kalman_arguments(name, by_token=by_token, train=train))


@pytest.mark.parametrize("name", ["dense-diagonal", "dense-rotation"])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_opcheck_of_the_mean_given_gains(name, additive, train):
    torch.library.opcheck(compiled.OPERATORS["mean_pass"], mean_pass_arguments(name, additive=additive, train=train))


@pytest.mark.parametrize("name", ["diagonal_2_groups-diagonal", "diagonal_2_groups-rotation"])
@pytest.mark.parametrize("train", [False, True])
def test_opcheck_of_the_diagonal_covariance(name, train):
    torch.library.opcheck(compiled.OPERATORS["diagonal"], diagonal_arguments(name, train=train))


@pytest.mark.parametrize("with_seen", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_opcheck_of_totals(with_seen, train):
    q, k = torch.rand(2, 1, 18, 2, 4)
    leaves = prepared([q, k, torch.rand(1, 18, 2), -torch.rand(1, 18, 2), torch.rand(1, 2, 4)], train)
    torch.library.opcheck(compiled.OPERATORS["totals"], (*leaves, 1.5, with_seen, train))


@pytest.mark.parametrize("transition", [mbd.DiagonalDecay(), mbd.DampedRotation()])
@pytest.mark.parametrize("train", [False, True])
def test_opcheck_of_the_gains_of_a_covariance_that_forgets(transition, train):
    design = mbd.DesignModel(transition, mbd.ObserveMemory(groups=2), mbd.PartialReset())
    problem = random_problem(design, B=1, T=18, H=2, D=4, M=4)
    step = problem.parameters
    names = ("write_noise", "retention", "prior_variance", "log_decay")
    tensors = [problem.k, problem.q, *(step[name] for name in names), step.get("angle")]
    leaves = prepared([*tensors, torch.eye(4).expand(1, 2, 2, 4, 4)], train)
    torch.library.opcheck(compiled.OPERATORS["gains"], (*leaves, 8, 16, True, train))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "name",
    [
        "dense-scalar",
        "dense-rotation",
        pytest.param("diagonal-scalar", marks=pytest.mark.slow),
        "reset-diagonal",
        "additive-scalar",
    ],
)
def test_torch_compile(name, backend):
    """The public function compiles without a graph break and gives the same numbers and gradients."""
    torch.compiler.reset()  # which counts how often one function was compiled
    design = DESIGNS[name]
    problem = random_problem(design, B=1, T=20, H=2, D=4, M=4)
    names = list(problem.parameters)

    def filtered(q, k, v, *parameters):
        step = dict(zip(names, parameters, strict=True))
        return mbd.filter_sequence(design, q, k, v, **step, backend=backend, chunk_size=8).output

    inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v, *problem.parameters.values())]
    expected = filtered(*inputs)
    compiled = torch.compile(filtered, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_compiling_is_announced_once(tmp_path):
    first, second = run(XDG_CACHE_HOME=str(tmp_path)), run(XDG_CACHE_HOME=str(tmp_path))
    assert "compiling kalman_token.c (float), once for this machine" in first.stderr
    assert "compiling" not in second.stderr
    assert first.stdout == second.stdout
    assert [path.suffix for path in (tmp_path / "membydesign").iterdir()] == [".so"]


def test_torch_compile_takes_native_code_on_first_use():
    program = PROGRAM.replace("out = mbd.filter_sequence(", "out = torch.compile(mbd.filter_sequence, backend=look)(")
    look = """
def look(graph, inputs):
    print([node.target for node in graph.graph.nodes if "kalman_forward" in str(node.target)])
    return graph
"""
    result = subprocess.run(
        [sys.executable, "-c", look + program], capture_output=True, text=True, timeout=300, check=True
    )
    assert "membydesign.kalman_forward" in result.stdout


@pytest.mark.slow
def test_several_processes_may_start_at_once(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(results)) == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CC": "", "PATH": ""}, "no C compiler was found"),
        pytest.param({"CC": "false"}, "could not be compiled", marks=pytest.mark.slow),
        pytest.param({"MEMBYDESIGN_NATIVE": "0"}, "", marks=pytest.mark.slow),
    ],
)
def test_without_native_code_torch_does_it(tmp_path, environment, message):
    """The same numbers to float32, and one line that says why."""
    out = run(XDG_CACHE_HOME=str(tmp_path), **environment)
    assert float(out.stdout) == pytest.approx(float(run().stdout), abs=2e-2)
    assert message in out.stderr
    assert out.stderr.count("filters through torch") == (1 if message else 0)
