"""Decoding steps in native code of covariances that forget, of blocks, and of unknown scales: the loop's numbers, and
the refusals of the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign import DesignModel, UnknownScale, catalogue
from membydesign.filter import api
from membydesign.filter.native.step import native_step, why_not
from membydesign.testing import assert_close, random_problem
from problems import TRANSITIONS

PLAIN = {name: TRANSITIONS[name] for name in ("identity", "scalar", "diagonal", "rotation")}
KEPT = {
    "partial_reset": mbd.PartialReset(prior=1.5),
    "discounted": mbd.Discounted(prior=1.5),
    "block_2": mbd.Block(2, prior=1.5),
    "block_3": mbd.Block(3, prior=1.5),
}


def designs() -> dict[str, Any]:
    """Every structure with every drift that moves rows or pairs of rows, and unknown scales around several."""
    every = {
        f"{kept}-{drift}": DesignModel(transition, mbd.ObserveMemory(groups=2), covariance)
        for kept, covariance in KEPT.items()
        for drift, transition in PLAIN.items()
        if (kept, drift) != ("block_3", "rotation")  # pairs of rows in two blocks
    }
    every["block_2-rotation_real"] = DesignModel(TRANSITIONS["rotation_real"], mbd.ObserveMemory(), mbd.Block(2))
    stationary = mbd.Stationary(TRANSITIONS["diagonal"])
    every["block_3-stationary"] = DesignModel(stationary, mbd.ObserveMemory(), mbd.Block(3))
    bases = ("partial_reset-rotation", "block_3-diagonal")
    every |= {f"scaled-{name}": UnknownScale(every[name]) for name in bases}
    dense = DesignModel(TRANSITIONS["diagonal"], mbd.ObserveMemory(groups=2), mbd.Dense())
    every["scaled-dense"] = UnknownScale(dense)
    every["scaled-diagonal"] = UnknownScale(dense.replace(covariance=mbd.Diagonal()))
    every["scaled-discount"] = UnknownScale(dense, discount=True)
    return every


DESIGNS = designs()
SIZES: dict[str, Any] = {"B": 2, "H": 3, "D": 12, "M": 6}


def steps(problem: Any, state: Any, t: int) -> tuple[Any, ...]:
    """The arguments of `native_step` at a token."""
    now = {name: x[:, t] for name, x in problem.parameters.items()}
    return problem.design, state, problem.q[:, t], problem.k[:, t], problem.v[:, t], now


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", DESIGNS)
def test_steps_are_those_of_the_loop(name, dtype):
    problem = random_problem(DESIGNS[name], T=7, dtype=dtype, **SIZES)
    assert why_not(problem.design) is None
    out, state = problem.filter(method="recurrent"), problem.prior()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for t in range(7):
        result = native_step(*steps(problem, state, t))
        assert result is not None, "step.c should run it"
        y, state = result
        assert_close(y, out.output[:, t], tolerance)
    for ours, theirs in zip(tensors(state), tensors(out.belief), strict=True):
        assert_close(ours, theirs, tolerance)
    assert type(state) is type(out.belief)


def tensors(state: Any) -> list[torch.Tensor]:
    return [x for part in state for x in (tensors(part) if isinstance(part, tuple) else [part])]


@pytest.mark.parametrize("drift", ["scalar", "rotation"])
def test_ends_of_partial_reset(drift):
    """Retention 0 and 1, also without decay, where what enters as noise is a difference of ones."""
    problem = random_problem(DESIGNS[f"partial_reset-{drift}"], T=1, **SIZES)
    problem.parameters["log_decay"] = torch.zeros_like(problem.parameters["log_decay"])
    for retention in (0.0, 1.0):
        problem.parameters["retention"] = torch.full_like(problem.parameters["retention"], retention)
        found = native_step(*steps(problem, problem.prior(), 0))
        assert found is not None
        out = problem.filter(method="recurrent")
        assert_close(found[0], out.output[:, 0], 1e-13)
        assert_close(found[1].covariance, out.belief.covariance, 1e-13)


BAD = {
    "partial_reset-scalar": {"retention": 1.5, "prior_variance": -1.0},
    "discounted-rotation": {"log_discount": 0.1},
    "block_3-diagonal": {"write_noise": 0.0},
    "scaled-discount": {"discount": -0.1, "log_decay": 1.0},
    "scaled-dense": {"write_noise": -1.0},
}


@pytest.mark.parametrize(("name", "parameter"), [(name, p) for name, bad in BAD.items() for p in bad])
def test_what_is_out_of_bounds_is_refused_in_the_words_of_the_long_way(name, parameter, monkeypatch):
    problem = random_problem(DESIGNS[name], T=1, **SIZES)
    problem.parameters[parameter] = torch.full_like(problem.parameters[parameter], BAD[name][parameter])
    design, state, q, k, v, now = steps(problem, problem.prior(), 0)
    assert native_step(design, state, q, k, v, now) is None
    with pytest.raises(ValueError, match=parameter) as error:
        mbd.filter_step(design, state, q, k, v, **now)
    monkeypatch.setattr(api, "native_step", lambda *_: None)
    with pytest.raises(type(error.value)) as expected:
        mbd.filter_step(design, state, q, k, v, **now)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("part", ["shape", "rate"])
def test_a_scale_that_cannot_be_is_left_to_the_long_way(part):
    problem = random_problem(DESIGNS["scaled-dense"], T=1, **SIZES)
    state = problem.prior()
    for value in (0.0, -1.0, float("nan"), float("inf")):
        wrong = getattr(state, part).clone()
        wrong[1, 2, 0] = value
        assert native_step(*steps(problem, state._replace(**{part: wrong}), 0)) is None
    for wrong in (getattr(state, part)[:1], getattr(state, part).int()):
        assert native_step(*steps(problem, state._replace(**{part: wrong}), 0)) is None
    assert native_step(*steps(problem, state.base, 0)) is None


def test_pairs_of_rows_in_two_blocks_are_left_to_the_long_way():
    design = DesignModel(TRANSITIONS["rotation"], mbd.ObserveMemory(), mbd.Block(3))
    problem = random_problem(design, T=1, **SIZES)
    assert native_step(*steps(problem, problem.prior(), 0)) is None
    assert mbd.filter_step(*steps(problem, problem.prior(), 0)[:-1], **steps(problem, None, 0)[-1])[0].isfinite().all()


@pytest.mark.parametrize("name", ["partial_reset", "discounted", "block_diagonal", "unknown_scale"])
def test_rows_of_the_catalogue_decode_natively(name):
    problem = random_problem(catalogue[name], T=3, D=32, M=32, B=1, H=2, dtype=torch.float32)
    state = problem.prior()
    for t in range(3):
        result = native_step(*steps(problem, state, t))
        assert result is not None
        state = result[1]
    assert_close(state.mean, problem.filter(method="recurrent").belief.mean, 2e-5)
