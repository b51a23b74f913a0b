"""Compare every kernel in Triton's interpreter with the loop in float64; a program that `run` starts.

Run it with TRITON_INTERPRET=1: the interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import membydesign as mbd

LENGTH = 20
"""Tokens: two chunks, the second one ragged."""

MOST = {"output": 5e-6, "mean": 5e-6, "covariance": 2e-6, "variance": 2e-6, "log_evidence": 1e-5, "gradient": 3e-5}
"""The largest distance of the float32 kernels from the float64 loop, in units of one plus the largest value."""

DESIGNS = {
    "scalar decay": (mbd.ScalarDecay(), 1),
    "diagonal decay": (mbd.DiagonalDecay(), 1),
    "rotation": (mbd.DampedRotation(), 1),
    "rotation, real noise, 2 groups": (mbd.DampedRotation(noise="real"), 2),
}


def problem(transition: mbd.Transition, groups: int, D: int) -> tuple[mbd.DesignModel, dict[str, torch.Tensor]]:
    """A design, and random float32 arguments of its filter."""
    design = mbd.DesignModel(transition, mbd.ObserveMemory(groups=groups), mbd.Dense())
    generator = torch.Generator().manual_seed(D)
    ranges = {"log_decay": (-0.5, 0.0), "angle": (-3.0, 3.0), "process_noise": (0.0, 0.05), "write_noise": (0.2, 1.0)}
    arguments = {name: torch.randn(1, LENGTH, 1, D, generator=generator) for name in ("q", "k", "v")}
    arguments["k"] = arguments["k"] / D**0.5
    for parameter in design.step_parameters:
        low, high = ranges[parameter.name]
        shape = (1, LENGTH, 1, *parameter.sizes(D, D, groups))
        arguments[parameter.name] = low + (high - low) * torch.rand(shape, generator=generator)
    return design, arguments


def everything(design: mbd.DesignModel, arguments: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """All that the filter returns, and the gradients of its sum of squares."""
    leaves: dict[str, Any] = {name: x.clone().requires_grad_() for name, x in arguments.items()}
    out = mbd.filter_sequence(design, **leaves, return_variance=True, return_evidence=True, **options)
    results = {"output": out.output, "mean": out.belief.mean, "covariance": out.belief.covariance}
    results |= {"variance": out.variance, "log_evidence": out.log_evidence}
    present = {name: x for name, x in results.items() if x is not None}
    loss = torch.stack([x.square().mean() for x in present.values()]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {**present, **{f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}}


def far(results: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """The distance of each quantity, gradients together."""
    distances: dict[str, float] = {}
    for name, x in exact.items():
        distance = ((results[name].double() - x).abs().max() / (1 + x.abs().max())).item()
        kind = name.partition(" ")[0]
        distances[kind] = max(distance, distances.get(kind, 0.0))
    return distances


def step(design: mbd.DesignModel, arguments: dict[str, Any]) -> dict[str, float]:
    """Compare the decoding kernel after the first tokens with the loop's step."""
    from membydesign.filter.checks import check_inputs
    from membydesign.filter.linear import dense_problem
    from membydesign.filter.triton.step import step_triton

    wide = {name: x.double() for name, x in arguments.items()}
    before = mbd.filter_sequence(design, **{name: x[:, :-1] for name, x in wide.items()}).belief
    now = {name: x[:, -1] for name, x in wide.items()}
    y, belief = mbd.filter_step(design, before, **now)
    parameters = {parameter.name: arguments[parameter.name] for parameter in design.step_parameters}
    inputs = check_inputs(design, arguments["q"], arguments["k"], arguments["v"], parameters, lead="B,T,H")
    inputs = inputs.between(LENGTH - 1, LENGTH)
    single = before.map(lambda x: x.float())
    drift, noise, x = dense_problem(design, inputs)
    stepped = step_triton(drift, noise, single, x.map(lambda part: part[:, 0]))
    assert stepped is not None
    output, after, _ = stepped
    results = {"output": output, "mean": after.mean, "covariance": after.covariance}
    return far(results, {"output": y, "mean": belief.mean, "covariance": belief.covariance})


def main(sizes: list[int]) -> None:
    """Print one line of JSON for each design and size."""
    from kernel_checks.interpreter import faster

    faster()
    torch.set_num_threads(1)
    for D in sizes:
        for name, (transition, groups) in DESIGNS.items():
            design, arguments = problem(transition, groups, D)
            exact = everything(design, {n: x.double() for n, x in arguments.items()}, method="recurrent")
            rows = {
                "sequence": far(everything(design, arguments, backend="triton"), exact),
                "step": step(design, arguments),
            }
            for kernel, distances in rows.items():
                worst = max(distance / MOST[what] for what, distance in distances.items())
                print(
                    json.dumps({"kernel": kernel, "design": name, "D": D, **distances, "of_allowed": worst}), flush=True
                )


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
