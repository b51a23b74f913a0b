"""Random problems for any design, and every design worth testing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import membydesign as mbd
from membydesign import Belief, DesignModel, Filtered, catalogue

TRANSITIONS = {
    "identity": mbd.Identity(),
    "scalar": mbd.ScalarDecay(),
    "diagonal": mbd.DiagonalDecay(),
    "rotation": mbd.DampedRotation(),
    "rotation_real": mbd.DampedRotation(noise="real"),
}
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
    return designs


DESIGNS = every_design()
EXACT_DESIGNS = {name: design for name, design in DESIGNS.items() if design.is_exact}
assert set(catalogue.values()) <= {
    d.replace(covariance=type(d.covariance)()) if d.keeps_covariance else d for d in DESIGNS.values()
}, "a catalogue row is not covered"


@dataclass(frozen=True)
class Problem:
    """Arguments of `filter_sequence` for one design."""

    design: DesignModel
    q: Tensor
    k: Tensor
    v: Tensor
    parameters: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def filter(self, **options) -> Filtered:
        return mbd.filter_sequence(self.design, self.q, self.k, self.v, **self.parameters, **self.options, **options)

    def step(self, belief: Belief, t: int) -> tuple[Tensor, Belief]:
        now = {name: x[:, t] for name, x in self.parameters.items()}
        return mbd.filter_step(self.design, belief, self.q[:, t], self.k[:, t], self.v[:, t], **now)

    def map(self, f) -> Problem:
        return replace(
            self, q=f(self.q), k=f(self.k), v=f(self.v), parameters={n: f(x) for n, x in self.parameters.items()}
        )

    def between(self, start: int, end: int) -> Problem:
        return self.map(lambda x: x[:, start:end])


def random_problem(
    design: DesignModel,
    *,
    B: int = 2,
    T: int = 7,
    H: int = 2,
    D: int = 4,
    M: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Keys of about unit norm, variances between 0.05 and 2, decays between 0.6 and 1, any angle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    sizes = {"": (), "D": (D,), "D/2": (D // 2,), "G": (design.write.groups,), "M": (M,)}
    ranges = {"log_decay": (-0.5, 0.0), "angle": (-3.1, 3.1)}
    parameters = {}
    for parameter in design.step_parameters:
        shape = (B, T, H, *sizes[parameter.last_axis])
        if parameter.name in ranges:
            parameters[parameter.name] = uniform(*ranges[parameter.name], *shape)
        else:
            parameters[parameter.name] = uniform(-3.0, 0.7, *shape).exp()
    problem = Problem(design, normal(B, T, H, D), normal(B, T, H, D) / D**0.5, normal(B, T, H, M), parameters)
    return problem.map(lambda x: x.to(dtype))


def random_belief(design: DesignModel, *, B: int = 2, H: int = 2, D: int = 4, M: int = 4, seed: int = 1) -> Belief:
    """A belief that somebody might hand over: a full mean and, where there is one, a full covariance."""
    generator = torch.Generator().manual_seed(seed)
    prior = Belief.prior(design, B, H, D, M, dtype=torch.float64)
    mean = torch.randn(prior.mean.shape, generator=generator, dtype=torch.float64)
    if prior.covariance is None:
        return Belief(mean)
    noise = torch.randn(prior.covariance.shape, generator=generator, dtype=torch.float64)
    if noise.ndim == mean.ndim:
        return Belief(mean, 0.1 + noise.square())
    return Belief(mean, noise @ noise.mT / D + 0.1 * torch.eye(D, dtype=torch.float64))
