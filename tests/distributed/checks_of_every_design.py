"""Every design with every transition, split over processes; `test_stretches.py` runs it, which takes minutes."""

from dataclasses import replace

import torch
import torch.distributed as dist

import membydesign as mbd
from distributed.stretches import compared
from membydesign import catalogue
from membydesign.testing import Problem
from problems import DESIGNS, STATIONARY, random_problem

LENGTHS = {2: ((5, 6), (0, 7)), 4: ((3, 1, 5, 2), (1, 0, 6, 2))}[dist.get_world_size()]
PACKED = {2: [0, 3, 9, 11], 4: [0, 2, 8, 11]}[dist.get_world_size()]
REMOVAL = mbd.DesignModel(mbd.DecayAndRemoval(), mbd.ObserveMemory(), mbd.Dense())
EVERY = {
    **DESIGNS,
    **catalogue,
    **{name: mbd.DesignModel(drift, mbd.ObserveMemory(groups=2), mbd.Dense()) for name, drift in STATIONARY.items()},
    "partial reset that rotates": mbd.DesignModel(
        mbd.DampedRotation(), mbd.ObserveMemory(groups=2), mbd.PartialReset()
    ),
    "feedback": mbd.DesignModel(mbd.KeyFeedback(), mbd.ObserveMemory(), mbd.Dense()),
    "unknown scale with a discount": mbd.UnknownScale(DESIGNS["dense-rotation"], discount=True),
    "removal": REMOVAL,
}


def tame(design: mbd.Design, T: int, dtype: torch.dtype) -> Problem | None:
    """A problem for a removal that lets nothing grow, as RWKV-7 has it; None for other designs."""
    if "removal" not in {parameter.name for parameter in design.step_parameters}:
        return None
    problem = random_problem(design, T=T, dtype=dtype)
    key = torch.nn.functional.normalize(problem.parameters["removal_key"], dim=-1)
    removal = 0.5 * problem.parameters["log_decay"].exp() * key
    return replace(problem, parameters={**problem.parameters, "removal_key": key, "removal": removal})


def check_every_design() -> None:
    for design in EVERY.values():
        for lengths in LENGTHS:
            compared(design, lengths, "pipeline" if isinstance(design.passages(), str) else "scan")


def check_every_design_in_float32() -> None:
    for design in EVERY.values():
        schedule = "pipeline" if isinstance(design.passages(), str) else "scan"
        problem = tame(design, sum(LENGTHS[0]), torch.float32)
        compared(design, LENGTHS[0], schedule, dtype=torch.float32, tolerance=2e-5, problem=problem)


def check_every_design_packed() -> None:
    for name, design in EVERY.items():
        if name == "low_rank":  # whose rows turn among each other where other sequences are filtered with them
            continue
        schedule = "pipeline" if isinstance(design.passages(), str) else "scan"
        compared(design, LENGTHS[0], schedule, cu_seqlens=PACKED)
