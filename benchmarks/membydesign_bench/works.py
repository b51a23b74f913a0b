"""What is measured: our designs, and Transformers' own CPU code for the same rules on the same inputs.

Inputs are converted to each convention before the clock starts, so that both give the same outputs, which
tests/benchmarks/test_bench.py checks:

    Transformers divides queries by √D, we do not                   it is given q √D
    its delta rules are given a gate β, ours a write noise r²       β = 1 / (r² + ‖k‖²), with our λ = 1
    they can normalise q and k, and are not asked to                k has norm 1 already
    log decays are the same: g = log a, for each head or each row
    its Mamba-2 is given x, Δ and A < 0                             A = −1: log a = −Δ; we write v = Δ x, noiselessly
    its B, C and head size are our k, q and M                       n_groups = H, state size = D, head size = M = D
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design import (
    DampedRotation,
    Dense,
    Design,
    DesignModel,
    DiagonalDecay,
    ObserveMemory,
    ScalarDecay,
    catalogue,
)
from membydesign.filter import filter_sequence, filter_step, fla
from membydesign_bench.problem import Problem, Size

if TYPE_CHECKING:
    from collections.abc import Callable

Task = Literal["forward", "forward+backward", "decode"]
TRAINING: tuple[Task, ...] = ("forward", "forward+backward")
TASKS: tuple[Task, ...] = (*TRAINING, "decode")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """Something that filters a problem.

    Attributes:
        title: as tables show it.
        inputs: what it takes from a problem, before the clock starts; backward differentiates by all of it.
        sequence: inputs → outputs [B,T,H,M].
        step: a problem of one token → the decoding step, ready to run; None if there is none to compare with.
    """

    title: str
    inputs: Callable[[Problem], Tensors]
    sequence: Callable[..., Tensor]
    step: Callable[[Problem], Callable[[], Tensor]] | None = None


def prepare(work: Work, task: Task, size: Size, device: str = "cpu") -> Callable[[], object]:
    """The work of one task at one size on one device, ready to run again and again."""
    if task == "decode":
        assert work.step is not None
        return work.step(Problem(size._replace(T=1), device))
    problem = Problem(size, device)
    inputs = {name: x.detach().contiguous() for name, x in work.inputs(problem).items()}
    if task == "forward":
        return lambda: work.sequence(**inputs)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    upstream = torch.randn(size.B, size.T, size.H, size.D, generator=torch.Generator().manual_seed(3)).to(problem.q)
    return lambda: torch.autograd.grad(work.sequence(**leaves), list(leaves.values()), upstream)


def _ours(design: Design, title: str, inputs: Callable[[Problem], Tensors], **fixed: Any) -> Work:
    """A design of ours; `fixed` are the arguments of the filter that are numbers or words."""

    def step(problem: Problem) -> Callable[[], Tensor]:
        B, H, _, D = problem.size
        belief = Belief.prior(design, B, H, D, D, device=problem.device)._replace(mean=problem.memory)
        token = {name: x[:, 0] for name, x in inputs(problem).items()}
        return lambda: filter_step(design, belief, **token, **fixed)[0]

    def sequence(**x: Tensor) -> Tensor:
        return filter_sequence(design, **x, **fixed).output

    return Work(title, inputs, sequence, step)


def _bayesian_inputs(problem: Problem, **drift: Tensor) -> Tensors:
    p = problem
    return {"q": p.q, "k": p.k, "v": p.v, "process_noise": p.process_noise, "write_noise": p.write_noise, **drift}


def bayesian(title: str = "Bayesian Layer", **options: Any) -> Work:
    """The Bayesian Layer with one decay for each head; `options` go to `filter_sequence`."""
    design = DesignModel(ScalarDecay(), ObserveMemory(), Dense())
    return _ours(design, title, lambda p: _bayesian_inputs(p, log_decay=p.log_decay), **options)


def transitions() -> dict[str, Work]:
    """Return the Bayesian Layer with each transition; the others are compared with the first."""
    rows = DesignModel(DiagonalDecay(), ObserveMemory(), Dense())
    turns = DesignModel(DampedRotation(), ObserveMemory(), Dense())
    return {
        "ScalarDecay": bayesian("ScalarDecay"),
        "DiagonalDecay": _ours(
            rows, "DiagonalDecay", lambda p: _bayesian_inputs(p, log_decay=p.log_decay_of_rows(p.size.D))
        ),
        "DampedRotation": _ours(
            turns,
            "DampedRotation",
            lambda p: _bayesian_inputs(p, log_decay=p.log_decay_of_rows(p.size.D // 2), angle=p.angle()),
        ),
    }


def _mamba2() -> Work:
    plain = _ours(
        catalogue["mamba2"],
        "Mamba-2",
        lambda p: {"q": p.q, "k": p.k, "v": (-p.log_decay[..., None] * p.v).to(p.v), "log_decay": p.log_decay},
        prior_variance=1.0,
        write_noise=0.0,
    )

    def sequence(q: Tensor, k: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        """Discretise inside the clock, as Transformers does."""
        return plain.sequence(q=q, k=k, v=(dt[..., None] * x).to(x), log_decay=-dt)

    return Work(plain.title, lambda p: {"q": p.q, "k": p.k, "x": p.v, "dt": -p.log_decay}, sequence, plain.step)


def _delta(design: DesignModel, title: str, log_decay: Callable[[Problem], Tensor]) -> Work:
    def inputs(p: Problem) -> Tensors:
        return {"q": p.q, "k": p.k, "v": p.v, "log_decay": log_decay(p), "write_noise": p.write_noise}

    return _ours(design, title, inputs, prior_variance=1.0)


OURS: dict[str, Work] = {
    "bayesian_layer": bayesian(),
    "gated_deltanet": _delta(catalogue["gated_deltanet"], "Gated DeltaNet", lambda p: p.log_decay),
    "kda": _delta(catalogue["kda"], "KDA", lambda p: p.log_decay_of_rows(p.size.D)),
    "mamba2": _mamba2(),
}


@cache
def transformers_function(model: str, function: str) -> Callable[..., Any] | None:
    """A function of Transformers in plain PyTorch, also where it would call another package; None without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        return inspect.unwrap(getattr(module, function))
    except (ImportError, AttributeError):
        return None


def _gate_inputs(p: Problem, log_decay: Tensor) -> Tensors:
    return {"query": p.q * p.size.D**0.5, "key": p.k, "value": p.v, "g": log_decay, "beta": p.gate()}


def _their_gated_deltanet() -> Work | None:
    chunk = transformers_function("qwen3_next", "torch_chunk_gated_delta_rule")
    step = transformers_function("qwen3_next", "torch_recurrent_gated_delta_rule")
    if chunk is None or step is None:
        return None

    def prepared_step(problem: Problem) -> Callable[[], Tensor]:
        inputs = _gate_inputs(problem, problem.log_decay)
        return lambda: step(**inputs, initial_state=problem.memory, output_final_state=True)[0][:, 0]

    return Work(
        "Transformers' Gated DeltaNet",
        lambda p: _gate_inputs(p, p.log_decay),
        lambda **x: chunk(**x, output_final_state=True)[0],
        prepared_step,
    )


def _their_kda() -> Work | None:
    chunk = transformers_function("kimi_linear", "chunk_kimi_delta_attention")
    if chunk is None:
        return None
    return Work(
        "Transformers' KDA",
        lambda p: _gate_inputs(p, p.log_decay_of_rows(p.size.D)),
        lambda **x: chunk(**x, output_final_state=True)[0],
    )


def _their_mamba2() -> Work | None:
    scan = transformers_function("mamba2", "mamba2_chunk_scan")
    if scan is None:
        return None

    def sequence(hidden_states: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        A = -torch.ones(dt.shape[-1])
        # Chunks of 64, as in all the others: on a CPU the scan is faster with them than with its models' 256.
        return scan(hidden_states, dt, A, B, C, chunk_size=64, return_final_states=True)[0]

    return Work(
        "Transformers' Mamba-2", lambda p: {"hidden_states": p.v, "dt": -p.log_decay, "B": p.k, "C": p.q}, sequence
    )


PEERS: dict[str, Callable[[], Work | None]] = {
    "gated_deltanet": _their_gated_deltanet,
    "kda": _their_kda,
    "mamba2": _their_mamba2,
}
"""The rules that Transformers has; each returns None where it is not installed."""


def _fla_delta(name: str, title: str, log_decay: Callable[[Problem], Tensor], step: str | None = None) -> Work | None:
    """A delta rule of flash-linear-attention's, and its decoding step; None where it is not installed."""
    chunk, one = fla.operation(name), None if step is None else fla.operation(step)
    if chunk is None:
        return None

    def inputs(p: Problem) -> Tensors:
        return {"q": p.q, "k": p.k, "v": p.v, "g": log_decay(p), "beta": p.gate()}

    def sequence(**x: Tensor) -> Tensor:
        return chunk(**x, scale=1.0, output_final_state=True)[0]

    if one is None:
        return Work(title, inputs, sequence)

    def prepared_step(problem: Problem) -> Callable[[], Tensor]:
        token = {**inputs(problem), "initial_state": problem.memory}
        return lambda: one(**token, scale=1.0, output_final_state=True)[0][:, 0]

    return Work(title, inputs, sequence, prepared_step)


def _fla_mamba2() -> Work | None:
    chunk = fla.operation("chunk_simple_gla")
    if chunk is None:
        return None

    def sequence(q: Tensor, k: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        return chunk(q=q, k=k, v=(dt[..., None] * x).to(x), g=-dt, scale=1.0, output_final_state=True)[0]

    return Work("fla's Mamba-2", lambda p: {"q": p.q, "k": p.k, "x": p.v, "dt": -p.log_decay}, sequence)


GPU_PEERS: dict[str, Callable[[], Work | None]] = {
    "gated_deltanet": lambda: _fla_delta(
        "chunk_gated_delta_rule", "fla's Gated DeltaNet", lambda p: p.log_decay, "fused_recurrent_gated_delta_rule"
    ),
    "kda": lambda: _fla_delta("chunk_kda", "fla's KDA", lambda p: p.log_decay_of_rows(p.size.D)),
    "mamba2": _fla_mamba2,
}
"""The same rules as flash-linear-attention has them, whose kernels run on GPUs alone."""


def peers(device: str) -> dict[str, Callable[[], Work | None]]:
    """Whom ours are compared with on a device."""
    return PEERS if device == "cpu" else GPU_PEERS


def rule_to_compare(name: str, task: Task) -> str:
    """Whom a design of ours is compared with: its own rule, and Gated DeltaNet for the Bayesian Layer and decoding."""
    return "gated_deltanet" if name == "bayesian_layer" or task == "decode" else name
