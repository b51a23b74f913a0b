"""What processes check of sequences that are split in time; `test_stretches.py` runs it."""

import torch.distributed as dist

import membydesign as mbd
from distributed.stretches import compared
from problems import DESIGNS

LENGTHS = {2: ((5, 6), (9, 2), (0, 7), (7, 0)), 4: ((3, 3, 3, 2), (1, 0, 6, 2), (0, 4, 0, 5))}


def check_a() -> None:
    for lengths in LENGTHS[dist.get_world_size()]:
        for schedule in ("scan", "pipeline"):
            compared(DESIGNS["dense-diagonal"], lengths, schedule)
            compared(DESIGNS["reset-scalar"], lengths, schedule)


def check_packed() -> None:
    for lengths in LENGTHS[dist.get_world_size()]:
        for cu in ([0, 4, sum(lengths)], [0, sum(lengths)], [0, 2, 3, 5, sum(lengths)]):
            for schedule in ("scan", "pipeline"):
                compared(DESIGNS["dense-diagonal"], lengths, schedule, cu_seqlens=cu)
