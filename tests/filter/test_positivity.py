"""A belief that a filter returns is accepted by the next call, or the filter itself raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import membydesign as mbd
from membydesign.testing import Problem
from problems import DESIGNS, TRANSITIONS, random_problem

WAYS: list[dict[str, Any]] = [
    {"method": "recurrent"},
    {"backend": "torch"},
    {"backend": "native"},
    {"backend": "native", "chunk_size": 16},
]
STEPS: dict[str, Any] = {"steps": True}
KEEPING = [name for name, design in DESIGNS.items() if design.keeps_covariance]


def name_of(way: dict[str, Any]) -> str:
    return "-".join(map(str, way.values()))


def hard_problem(design: mbd.DesignModel, seed: int, dtype: torch.dtype, D: int = 6, T: int = 30) -> Any:
    """Noises that differ by up to sixteen orders of magnitude, keys along rows or in all directions."""
    generator = torch.Generator().manual_seed(seed)
    problem = random_problem(design, B=1, H=2, D=D, M=4, T=T, seed=seed, dtype=dtype)
    scale = 10 ** (-8 + 8 * torch.rand((), generator=generator).item())
    parameters = dict(problem.parameters)
    parameters["write_noise"] = parameters["write_noise"] * scale
    if "process_noise" in parameters:
        on = torch.rand((), generator=generator).item() < 0.5
        parameters["process_noise"] = parameters["process_noise"] * (1e3 if on else 0.0)
    keys = problem.k
    if torch.rand((), generator=generator).item() < 0.5:  # almost along one row each
        rows = torch.randint(D, keys.shape[:-1], generator=generator)
        keys = torch.nn.functional.one_hot(rows, D).to(dtype) + 1e-3 * keys
    return Problem(problem.design, problem.q, keys, problem.v, parameters, problem.options)


def negative_eigenvalue(belief: Any) -> float:
    """The smallest eigenvalue, in units of the largest variance."""
    P = belief.dense_covariance().double()
    return (torch.linalg.eigvalsh(P)[..., 0] / P.diagonal(dim1=-2, dim2=-1).amax(-1)).min().item()


def tried(call: Any) -> tuple[Any, str]:
    """What a call returns, and what it says if rounding destroyed a covariance."""
    try:
        return call(), ""
    except mbd.NotPositiveDefiniteError as error:
        return None, str(error)


def stepped(problem: Any) -> Any:
    belief = problem.prior()
    for t in range(problem.q.shape[1]):
        _, belief = problem.step(belief, t)
    return belief


@pytest.mark.parametrize("way", [*WAYS, STEPS], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KEEPING)
def test_a_returned_belief_is_accepted(name, dtype, way):
    accepted = 0
    for seed in range(6):
        problem = hard_problem(DESIGNS[name], seed, dtype)
        belief, refusal = tried(lambda p=problem: stepped(p) if way is STEPS else p.filter(**way).belief)
        if belief is None:
            assert "the covariance stopped being positive definite" in refusal
            continue
        first = problem.between(0, 1)
        for call in (lambda p=first, b=belief: p.filter(initial=b), lambda p=first, b=belief: p.step(b, 0)):
            _, refusal = tried(call)  # at a token of its own, not for what it was handed
            assert not refusal or refusal.startswith("the covariance stopped being positive definite")
        accepted += 1
    assert accepted >= 3


@pytest.mark.parametrize("way", [*WAYS[:3], STEPS], ids=name_of)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_diagonal_variances_stay_positive(transition, way):
    """ℓ²/r² = 1e7 in float32: every variance is positive, and as exact as float64's."""
    design = mbd.DesignModel(TRANSITIONS[transition], mbd.ObserveMemory(), mbd.Diagonal())
    for seed in range(5):
        problem = random_problem(design, B=2, H=3, D=6, T=25, seed=seed, dtype=torch.float32)
        rows = torch.randint(6, (2, 25, 3), generator=torch.Generator().manual_seed(seed))
        keys = torch.nn.functional.one_hot(rows, 6) + 1e-5 * problem.k
        problem = Problem(
            design,
            problem.q,
            keys,
            problem.v,
            problem.parameters
            | {"process_noise": torch.full((2, 25, 3), 1e3), "write_noise": torch.full((2, 25, 3), 1e-4)},
        )
        exact = problem.map(lambda x: x.double()).filter(method="recurrent").belief.covariance
        belief = stepped(problem) if way is STEPS else problem.filter(**way).belief
        assert (belief.covariance > 0).all()
        distance = (belief.covariance.double() / exact - 1).abs().max().item()
        assert distance < 1e-5, distance


@pytest.mark.parametrize("way", [*WAYS[:3], STEPS], ids=name_of)
@pytest.mark.parametrize("transition", ["identity", "scalar", "diagonal"])
def test_a_diagonal_of_one_row(transition, way):
    """D = 1, resolved by every write, is the scalar Kalman filter; `make sanitize` runs it too."""
    design = mbd.DesignModel(TRANSITIONS[transition], mbd.ObserveMemory(), mbd.Diagonal(prior=2.0))
    problem = random_problem(design, B=2, H=2, D=1, T=5, dtype=torch.float64)
    parameters = problem.parameters | {"write_noise": torch.full((2, 5, 2), 1e-4, dtype=torch.float64)}
    problem = Problem(design, problem.q, 1 + problem.k.square(), problem.v, parameters)
    belief = stepped(problem) if way is STEPS else problem.filter(**way).belief
    expected = torch.full((2, 2), 2.0).double()
    for t in range(5):
        decay = parameters.get("log_decay", torch.zeros(2, 5, 2).double())[:, t].reshape(2, 2).exp()
        predicted = decay**2 * expected + parameters["process_noise"][:, t]
        expected = 1 / (1 / predicted + problem.k[:, t, :, 0] ** 2 / 1e-4)
    torch.testing.assert_close(belief.covariance.flatten(1), expected, rtol=1e-10, atol=0)
    if way is not STEPS:
        reference = gradients(problem, method="recurrent")
        for name, gradient in gradients(problem, **way).items():
            torch.testing.assert_close(gradient, reference[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("way", [*WAYS, STEPS], ids=name_of)
@pytest.mark.parametrize("write_noise", [1e-6, 1e-7])
def test_dense_covariances_of_sure_writes(way, write_noise):
    """p₀ = 1, no process noise, float32: what is returned is positive semi-definite, and what is not is reported."""
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
    D, eps = 8, torch.finfo(torch.float32).eps
    for seed in range(20):
        q = torch.randn(1, D, 1, D, generator=torch.Generator().manual_seed(seed))
        noises = {"process_noise": torch.zeros(1, D, 1), "write_noise": torch.full((1, D, 1), write_noise)}
        problem = Problem(design, q, q, q, noises)
        belief, refusal = tried(lambda p=problem: stepped(p) if way is STEPS else p.filter(**way).belief)
        if belief is None:
            position = 0 if way is STEPS else D - 1
            assert f"in torch.float32 at batch 0, position {position}, head 0, group 0" in refusal
            assert negative_eigenvalue(problem.filter(state_dtype=torch.float64).belief) > 0
            continue
        assert negative_eigenvalue(belief) > -8 * D * eps
        softer = Problem(design, q, q, q, {name: torch.ones(1, D, 1) for name in noises})
        softer.filter(initial=belief)
        softer.step(belief, 0)


def test_a_lost_covariance_is_reported_for_packed_sequences():
    """Idle tokens that pad a sequence do not hide what its last write did."""
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
    k = torch.randn(1, 17, 1, 8, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 8, 17])
    with pytest.raises(mbd.NotPositiveDefiniteError, match="position [0-9]+, head 0, group 0"):
        mbd.filter_sequence(design, k, k, k, cu_seqlens=ends, process_noise=0.0, write_noise=1e-7, backend="native")


def resolving_problem(transition: str, dtype: torch.dtype) -> Any:
    """Writes that leave a row, or both rows of a pair, with almost nothing of their variance."""
    design = mbd.DesignModel(TRANSITIONS[transition], mbd.ObserveMemory(groups=2), mbd.Diagonal())
    problem = random_problem(design, B=2, H=2, D=4, M=4, T=9, dtype=dtype)
    keys = torch.nn.functional.one_hot(torch.arange(9) % 4, 4).to(dtype)[None, :, None] + 0.01 * problem.k
    noise = 1e-3 * problem.parameters["write_noise"]
    return Problem(design, problem.q, keys, problem.v, problem.parameters | {"write_noise": noise})


def gradients(problem: Any, **way: Any) -> dict[str, Tensor]:
    leaves = {"k": problem.k, **problem.parameters}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    parameters = {name: x for name, x in leaves.items() if name != "k"}
    problem = Problem(problem.design, problem.q, leaves["k"], problem.v, parameters)
    out = problem.filter(return_variance=True, **way)
    generator = torch.Generator().manual_seed(1)
    terms = [
        (x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum()
        for x in (out.output, out.variance, out.belief.covariance.log())  # whose gradient is relative
    ]
    return dict(zip(leaves, torch.autograd.grad(terms, list(leaves.values())), strict=True))


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_gradients_of_resolved_rows(transition):
    """Loop, torch and native code agree in float64, and float32 does not lose what they find."""
    problem = resolving_problem(transition, torch.float64)
    reference = gradients(problem, method="recurrent")
    for way in WAYS[1:3]:
        for name, gradient in gradients(problem, **way).items():
            torch.testing.assert_close(
                gradient, reference[name], rtol=1e-8, atol=1e-9 * reference[name].abs().max().item()
            )
    for way in WAYS[:3]:
        for name, gradient in gradients(problem.map(lambda x: x.float()), **way).items():
            distance = (gradient.double() - reference[name]).norm() / reference[name].norm()
            assert distance < 1e-3, (way, name, distance)


@pytest.mark.parametrize("transition", ["diagonal", "rotation", "rotation_real"])
def test_gradients_of_resolved_rows_are_those_of_differences(transition):
    problem = resolving_problem(transition, torch.float64).between(0, 4)
    names = ["k", *problem.parameters]

    def variances(*values: Tensor) -> Tensor:
        k, *rest = values
        parameters = dict(zip(names[1:], rest, strict=True))
        changed = Problem(problem.design, problem.q, k, problem.v, parameters)
        return changed.filter(backend="native").belief.covariance.log()

    values = tuple(x[:1].clone().requires_grad_() for x in (problem.k, *problem.parameters.values()))
    problem = problem.map(lambda x: x[:1])
    assert torch.autograd.gradcheck(variances, values, eps=1e-8, atol=1e-3, rtol=1e-3)


def test_a_step_after_large_process_noise():
    """The variance comes from process noise alone, and rounding turns what the write leaves of it negative."""
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense(prior=0.0))
    refused = 0
    for seed in range(40):
        k = torch.randn(1, 1, 1, generator=torch.Generator().manual_seed(seed))
        belief = design.prior(mbd.Sizes(1, 1, 1, 1), dtype=torch.float32, device="cpu")
        result, refusal = tried(
            lambda k=k, b=belief: mbd.filter_step(design, b, k, k, k, process_noise=2e7, write_noise=0.1)
        )
        refused += result is None
        assert refusal.startswith("the covariance stopped") if result is None else (result[1].covariance >= 0).all()
    assert 0 < refused < 40


@pytest.mark.parametrize("chunk_size", [None, 7, 16])
def test_large_process_noise_in_float32(chunk_size):
    """ℓ²/r² up to 1e7: native code is as close to float64 as the loop is, whatever the chunk."""
    design = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(), mbd.Dense())
    problem = random_problem(design, B=2, H=3, D=4, M=4, T=40, dtype=torch.float32)
    scale = 10 ** (7 * torch.rand(2, 40, 3, generator=torch.Generator().manual_seed(0)) - 1)
    problem = Problem(design, problem.q, problem.k, problem.v, problem.parameters | {"process_noise": scale})
    exact = problem.map(lambda x: x.double()).filter(method="recurrent").output

    def distance(**way: Any) -> float:
        return ((problem.filter(**way).output - exact).norm() / exact.norm()).item()

    assert distance(backend="native", chunk_size=chunk_size) < max(2 * distance(method="recurrent"), 1e-6)
