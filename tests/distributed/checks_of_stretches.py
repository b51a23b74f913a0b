"""What processes check of sequences that are split in time; `test_stretches.py` runs it."""

import torch
import torch.distributed as dist

import membydesign as mbd
from distributed.stretches import compared
from membydesign import catalogue
from problems import DESIGNS

LENGTHS = {2: ((5, 6), (0, 7)), 4: ((3, 3, 3, 2), (1, 0, 6, 2))}


def check_a() -> None:
    every = {**{n: d for n, d in DESIGNS.items() if n not in catalogue}, **catalogue}
    every["removal"] = mbd.DesignModel(mbd.DecayAndRemoval(), mbd.ObserveMemory(), mbd.Dense())
    every["p2"] = mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(groups=2), mbd.PartialReset())
    every["us"] = mbd.UnknownScale(DESIGNS["dense_2_groups-rotation"].replace(write=mbd.ObserveMemory()), discount=True)
    bad = []
    for name, design in every.items():
        for lengths in LENGTHS[dist.get_world_size()]:
            for schedule in ("scan", "pipeline"):
                if schedule == "scan" and isinstance(design.passages(), str):
                    continue
                try:
                    compared(design, lengths, schedule)
                    compared(design, lengths, schedule, dtype=torch.float32, tolerance=1e-5)
                except AssertionError as e:
                    bad.append((name, str(e)))
    if bad: raise AssertionError("\n".join(map(str, bad)))
