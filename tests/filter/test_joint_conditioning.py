"""Every exact design equals conditioning of the dense joint Gaussian, which knows nothing of recursions."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import membydesign as mbd
from membydesign import Belief
from membydesign.testing import assert_close, condition
from problems import EXACT_DESIGNS, Problem, random_belief, random_problem

TOLERANCE = 1e-12
WAYS = [
    {"method": "recurrent"},
    {"method": "chunk", "backend": "torch", "chunk_size": 4},
    {"method": "chunk", "backend": "native"},
]
"""The specification itself, and each fast path on its own."""


def assert_equals_conditioning(problem: Problem, initial: Belief | None, cu_seqlens: torch.Tensor | None = None):
    for way in WAYS:
        assert_way_equals_conditioning(problem, initial, cu_seqlens, way)


def assert_way_equals_conditioning(
    problem: Problem, initial: Belief | None, cu_seqlens: torch.Tensor | None, way: dict[str, Any]
):
    assert isinstance(problem.design, mbd.DesignModel)
    keeps_covariance = problem.design.keeps_covariance
    wanted = {"return_evidence": True, "return_variance": keeps_covariance}
    out = problem.filter(**way, **wanted, initial=initial, cu_seqlens=cu_seqlens)
    assert out.log_evidence is not None
    bounds = [0, problem.q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = range(problem.q.shape[0]) if cu_seqlens is None else range(len(bounds) - 1)
    for n in rows:
        start, end = (bounds[n], bounds[n + 1]) if cu_seqlens is not None else bounds
        b = 0 if cu_seqlens is not None else n
        part = problem.between(start, end)
        first = None if initial is None else initial.map(lambda x, n=n: x[n : n + 1] if cu_seqlens is not None else x)
        for h in range(problem.q.shape[2]):
            exact = condition(part, b, h, first)
            q = part.q[b, :, h]
            expected = torch.einsum("td,tdm->tm", q, exact.mean)
            assert_close(out.output[b, start:end, h], expected, TOLERANCE)
            assert_close(out.belief.mean[n, h], exact.mean[-1], TOLERANCE)
            assert_close(out.log_evidence[n, h], exact.log_evidence, TOLERANCE)
            if keeps_covariance:
                assert out.belief.covariance is not None
                assert out.variance is not None
                assert_close(out.belief.covariance[n, h], exact.covariance[-1], TOLERANCE)
                variance = torch.einsum("td,tgde,te->tg", q, exact.covariance, q)
                assert_close(out.variance[b, start:end, h], variance, TOLERANCE)


@pytest.mark.parametrize("name", EXACT_DESIGNS)
def test_exact_designs_equal_joint_conditioning(name):
    design = EXACT_DESIGNS[name]
    assert_equals_conditioning(random_problem(design, T=9, D=6), initial=None)
    assert_equals_conditioning(random_problem(design, T=5, seed=3), initial=random_belief(design))


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(EXACT_DESIGNS)),
    pairs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    given_belief=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_designs_lengths_and_boundaries(name, pairs, lengths, given_belief, seed):
    """Packed sequences of random lengths, with or without beliefs of their own."""
    design, D = EXACT_DESIGNS[name], 2 * pairs
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    problem = random_problem(design, B=1, T=int(bounds[-1]), D=D, seed=seed)
    initial = random_belief(design, B=len(lengths), D=D, seed=seed + 1) if given_belief else None
    assert_equals_conditioning(problem, initial, bounds)


def test_scalar_of_an_exact_filter_by_hand():
    """One dimension, one write: the textbook update, in numbers one can check on paper."""
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense(prior=3.0))
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out = mbd.filter_sequence(
        design, one, one, 2 * one, process_noise=1.0, write_noise=4.0, return_variance=True, return_evidence=True
    )
    assert out.variance is not None
    assert out.log_evidence is not None
    assert out.output.item() == pytest.approx(4 / (4 + 4) * 2, abs=1e-15)  # P̄ = 4, gain ½
    assert out.variance.item() == pytest.approx(2.0, abs=1e-15)  # 4 − 4²/8
    log_density = torch.distributions.Normal(0.0, 8**0.5).log_prob(torch.tensor(2.0, dtype=torch.float64))
    assert out.log_evidence.item() == pytest.approx(log_density.item(), abs=1e-7)
