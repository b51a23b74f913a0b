"""How beliefs pass a stretch of tokens: maps that a stretch gives alone, applied to any belief before it."""

import pytest
import torch

import membydesign as mbd
import membydesign.testing
from membydesign import catalogue
from membydesign.filter.context.sequence import Probe
from membydesign.filter.inputs import Inputs
from membydesign.state import map_state, named_tensors
from problems import DESIGNS, STATIONARY, random_problem

MORE = {
    "removal": mbd.DesignModel(mbd.DecayAndRemoval(), mbd.ObserveMemory(), mbd.Dense()),
    "stationary rotation": mbd.DesignModel(STATIONARY["stationary_rotation"], mbd.ObserveMemory(2), mbd.Dense()),
    "partial reset in groups": mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(2), mbd.PartialReset()),
    "discounted scale": mbd.UnknownScale(DESIGNS["dense-diagonal"], discount=True),
}
EVERY = {**DESIGNS, **catalogue, **MORE}
COMPOSED = {name: design for name, design in EVERY.items() if not isinstance(design.passages(), str)}


def passed(problem: mbd.testing.Problem, before) -> list[tuple[str, torch.Tensor]]:
    """The state after a problem, from the maps of its tokens and the state before."""
    x = Inputs(problem.q, problem.k, problem.v, problem.parameters)
    state = map_state(lambda s: s.double(), before)
    passages = problem.design.passages()
    assert not isinstance(passages, str)
    for passage in passages:
        element = passage.element(problem.design, x, before, Probe("auto"))
        assert tuple(tuple(part.shape) for part in element) == passage.shapes(problem.design, before)
        state = passage.passed(problem.design, tuple(part.double() for part in element), state)
    return list(named_tensors(state))


@pytest.mark.parametrize("name", COMPOSED)
def test_maps_of_a_stretch_lead_to_the_filters_belief(name):
    problem = random_problem(COMPOSED[name], T=14)
    before = problem.between(0, 5).filter().belief
    expected = named_tensors(problem.filter().belief)
    for (part, x), (_, y) in zip(passed(problem.between(5, 14), before), expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-9), part


def test_every_exact_design_has_maps_or_says_why_not():
    reasons = {name: design.passages() for name, design in EVERY.items() if name not in COMPOSED}
    exact = {name: reason for name, reason in reasons.items() if EVERY[name].is_exact}
    assert exact == {
        "hidden_markov": "since the map of a stretch is a D×D matrix for every value column, D times as large as the "
        "belief"
    }
    assert reasons["robust_writes"] == "since the noise of StudentTWrite may depend on what memory holds"
    assert "Diagonal truncates the covariance at every write" in reasons["bayesian_layer_diagonal"]
    assert "MLSTMMemory does not say" in reasons["mlstm"]


@pytest.mark.parametrize(("noise", "tolerance"), [(1e-1, 1e-13), (1e-4, 1e-12), (1e-8, 1e-8), (1e-12, 1e-4)])
def test_sure_writes_cost_digits(noise, tolerance):
    """docs/howto/context-parallel.md names how many."""
    problem = random_problem(catalogue["bayesian_layer"], B=1, T=20, D=16, M=16)
    still = {"log_decay": 0.0, "process_noise": 1e-3, "write_noise": noise}
    problem.parameters.update({name: torch.full_like(problem.parameters[name], x) for name, x in still.items()})
    before = problem.between(0, 8).filter().belief
    expected = named_tensors(problem.filter().belief)
    for (part, x), (_, y) in zip(passed(problem.between(8, 20), before), expected, strict=True):
        assert (x - y).abs().max() <= tolerance * y.abs().max(), part


def test_parameters_of_a_discount_that_forgets_everything():
    """A retention of 0 forgets the covariance at its start; maps and gradients stay finite."""
    problem = random_problem(catalogue["partial_reset"], T=6)
    problem.parameters["retention"] = torch.zeros_like(problem.parameters["retention"]).requires_grad_()
    before = problem.prior()
    found = passed(problem, before)
    for (part, x), (_, y) in zip(found, named_tensors(problem.filter().belief), strict=True):
        assert torch.allclose(x, y, atol=1e-12), part
    (gradient,) = torch.autograd.grad(torch.stack([x.sum() for _, x in found]).sum(), problem.parameters["retention"])
    assert gradient.isfinite().all()
