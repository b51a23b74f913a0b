"""The matrices of the built-in transitions, written from their definitions: the oracle takes them from `apply`."""

import pytest
import torch

import membydesign as mbd
from membydesign.testing import transition_matrices
from membydesign.testing.oracles import noise_matrices
from problems import random_problem

EYE = torch.eye(4, dtype=torch.float64)


def turned(rho, angle):
    """One damped rotation of a pair, as its 2×2 matrix."""
    return rho * torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])


MATRICES = {
    mbd.Identity(): lambda p: EYE,
    mbd.ScalarDecay(): lambda p: p["log_decay"].exp() * EYE,
    mbd.DiagonalDecay(): lambda p: torch.diag(p["log_decay"].exp()),
    mbd.DampedRotation(): lambda p: torch.block_diag(*map(turned, p["log_decay"].exp(), p["angle"])),
    mbd.DampedRotation(noise="real"): lambda p: torch.block_diag(*map(turned, p["log_decay"].exp(), p["angle"])),
    mbd.DecayAndRemoval(): lambda p: torch.diag(p["log_decay"].exp()) - torch.outer(p["removal"], p["removal_key"]),
}


@pytest.mark.parametrize("transition", MATRICES, ids=repr)
def test_matrices_follow_the_definition(transition):
    problem = random_problem(mbd.DesignModel(transition, mbd.ObserveMemory(), mbd.Dense()))
    matrices, noises = transition_matrices(problem, 1, 0), noise_matrices(problem, 1, 0)
    rows = torch.tensor([1.0, 0.0, 1.0, 0.0]) if transition == mbd.DampedRotation(noise="real") else torch.ones(4)
    for t, (A, Q) in enumerate(zip(matrices, noises, strict=True)):
        now = {name: x[1, t, 0] for name, x in problem.parameters.items()}
        torch.testing.assert_close(A, MATRICES[transition](now), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(Q, now["process_noise"] * torch.diag(rows).double(), rtol=1e-14, atol=1e-14)
