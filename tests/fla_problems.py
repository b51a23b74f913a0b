"""Designs that flash-linear-attention can filter, problems for them, and all that a filter finds and hands back."""

from __future__ import annotations

from dataclasses import replace

import torch

import membydesign as mbd
from membydesign.testing import assert_close
from problems import random_belief, random_problem

OPERATIONS = {
    # design: in float32, in bfloat16
    "linear_attention": ("chunk_simple_gla", "chunk_simple_gla"),
    "retnet": ("chunk_simple_gla", "chunk_simple_gla"),
    "mamba2": ("chunk_simple_gla", "chunk_simple_gla"),
    "gla": ("chunk_gla", "chunk_gla"),
    "deltanet": ("chunk_gated_delta_rule", "chunk_delta_rule"),
    "gated_deltanet": ("chunk_gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("chunk_kda", "chunk_kda"),
    "covariance_reset": ("chunk_kda", "chunk_kda"),
}
"""Which operation runs a design."""


def problem_of(design, dtype=torch.float32, **sizes):
    """Keys and values of different sizes, decays and noises in float32; q, k and v in `dtype`."""
    problem = random_problem(design, **{"T": 13, "D": 6, "M": 5, "dtype": torch.float32, **sizes})
    return replace(problem, q=problem.q.to(dtype), k=problem.k.to(dtype), v=problem.v.to(dtype))


def everything(problem, initial, **way):
    """Output, mean and the gradients of a fixed random combination of them, by name."""
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters, "mean": initial.mean}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    q, k, v, mean = (leaves[name] for name in ("q", "k", "v", "mean"))
    parameters = {name: leaves[name] for name in problem.parameters}
    out = replace(problem, q=q, k=k, v=v, parameters=parameters).filter(initial=mbd.Belief(mean), **way)
    assert out.output.dtype == problem.q.dtype
    assert out.belief.mean.dtype == torch.float32
    found = {"output": out.output, "end": out.belief.mean}
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found.values()]
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), weights)
    return {**found, **{f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}}


def assert_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        assert found[name].dtype == reference.dtype, name
        scale = 1 + reference.abs().max().item()
        assert_close(found[name].float() / scale, reference.float() / scale, tolerance, name)


def belief_for(design, problem, B=2):
    initial = random_belief(design, B=B, D=problem.q.shape[-1], M=problem.v.shape[-1])
    return initial.map(lambda x: x.float())
