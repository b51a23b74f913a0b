"""Random problems for any design, and every design worth testing."""

from __future__ import annotations

from itertools import product

import torch

import membydesign as mbd
from membydesign import Belief, DesignModel, catalogue
from membydesign.testing import Problem, random_problem

__all__ = [
    "BEYOND",
    "DESIGNS",
    "EXACT_DESIGNS",
    "REMOVAL",
    "RULES",
    "STATIONARY",
    "TRANSITIONS",
    "Problem",
    "random_belief",
    "random_problem",
    "removal_rule",
]

TRANSITIONS = {
    "identity": mbd.Identity(),
    "scalar": mbd.ScalarDecay(),
    "diagonal": mbd.DiagonalDecay(),
    "rotation": mbd.DampedRotation(),
    "rotation_real": mbd.DampedRotation(noise="real"),
}
STATIONARY = {f"stationary_{name}": mbd.Stationary(transition) for name, transition in TRANSITIONS.items()}
RULES = {
    "dense": (mbd.ObserveMemory(), mbd.Dense(prior=1.5)),
    "dense_2_groups": (mbd.ObserveMemory(groups=2), mbd.Dense(prior=1.5)),
    "dense_per_column": (mbd.ObserveMemory(groups=4), mbd.Dense(prior=0.7)),
    "diagonal": (mbd.ObserveMemory(), mbd.Diagonal(prior=1.5)),
    "diagonal_2_groups": (mbd.ObserveMemory(groups=2), mbd.Diagonal(prior=1.5)),
    "reset": (mbd.ObserveMemory(), mbd.Reset()),
    "reset_2_groups": (mbd.ObserveMemory(groups=2), mbd.Reset()),
    "per_column_reset": (mbd.ObserveMemory(), mbd.PerColumnReset()),
    "additive": (mbd.LatentInput(), mbd.MeanOnly()),
    "additive_dense": (mbd.LatentInput(), mbd.Dense(prior=0.3)),
}


def every_design() -> dict[str, DesignModel]:
    """Every rule with every transition that it can have, named `rule-transition`."""
    designs = {}
    for (rule, (write, covariance)), (drift, transition) in product(RULES.items(), TRANSITIONS.items()):
        if drift == "rotation_real" and not rule.startswith(("dense", "diagonal")):
            continue  # refused: no process noise (tests/design/test_model.py)
        designs[f"{rule}-{drift}"] = DesignModel(transition, write, covariance)
    for rule, drift in (  # tests/design/test_stationary.py has the others
        ("dense", "diagonal"),
        ("dense_2_groups", "rotation_real"),
        ("diagonal", "diagonal"),
    ):
        drift = f"stationary_{drift}"
        designs[f"{rule}-{drift}"] = DesignModel(STATIONARY[drift], *RULES[rule])
    return designs


DESIGNS = every_design()
EXACT_DESIGNS = {name: design for name, design in DESIGNS.items() if design.is_exact}
BEYOND = {
    "partial_reset",
    "discounted",
    "unknown_scale",
    "robust_writes",
    "block_diagonal",
    "low_rank",
    "kalman_delta_isotropic",
    "kalman_delta_diagonal",
    "comba",
    "rwkv7",
}
"""Rows with tests of their own: in design/ those of covariances that forget, unknown scales, Student-t writes, blocks
and low rank; in filter/ test_relatives.py, test_recurrences.py and test_removal.py."""

assert {design for name, design in catalogue.items() if name not in BEYOND and isinstance(design, DesignModel)} <= {
    d.replace(covariance=type(d.covariance)()) if d.keeps_covariance else d for d in DESIGNS.values()
}, "a catalogue row is not covered"


def random_belief(design: DesignModel, *, B: int = 2, H: int = 2, D: int = 4, M: int = 4, seed: int = 1) -> Belief:
    """A belief that somebody might hand over: a full mean and, where there is one, a full covariance."""
    generator = torch.Generator().manual_seed(seed)
    prior = Belief.prior(design, B, H, D, M, dtype=torch.float64)
    mean = torch.randn(prior.mean.shape, generator=generator, dtype=torch.float64)
    if prior.covariance is None:
        return Belief(mean)
    noise = torch.randn(prior.covariance.shape, generator=generator, dtype=torch.float64)
    if isinstance(prior, mbd.DiagonalBelief):
        return mbd.DiagonalBelief(mean, 0.1 + noise.square())
    return Belief(mean, noise @ noise.mT / D + 0.1 * torch.eye(D, dtype=torch.float64))


REMOVAL = catalogue["rwkv7"]
"""RWKV-7's memory."""


def removal_rule(log_decay, removal_key, removal, k, v, q, *, initial=None, **options):
    """Outputs and memory of RWKV-7's recurrence with a noiseless write."""
    parameters = {"log_decay": log_decay, "removal_key": removal_key, "removal": removal}
    initial = None if initial is None else mbd.Belief(initial)
    noiseless = {"prior_variance": 1.0, "write_noise": 0.0}
    out = mbd.filter_sequence(REMOVAL, q, k, v, **parameters, **noiseless, initial=initial, **options)
    return out.output, out.belief.mean
