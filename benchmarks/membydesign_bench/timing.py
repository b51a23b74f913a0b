"""Time things in turn, and keep what was measured in rows.

`torch.utils.benchmark.Timer` is not used, because its readings would not be equivalent: it warms up with at least two
runs before every reading, which triples rounds that take seconds, switches the garbage collector off while it times,
and on a GPU reads the host's clock instead of the device's events.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from membydesign_bench.problem import Size

SHORTEST_MS = 5.0
"""Anything faster is run several times for each reading."""

PRODUCT_N = 1024

RESOLUTION = {"MiB": 1.0}
"""A reference below this cannot be told from the kernel's own bookkeeping: no ratio is given."""


@dataclass(frozen=True)
class Row:
    """One measurement, and what it is compared with.

    Attributes:
        section: its name in `SECTIONS`.
        task: forward, forward+backward, decode or what the section does.
        size: B,H,T,D, or tokens.
        what: what was measured.
        value: how much of `unit`; None if it failed.
        unit: of `value` and `reference`.
        against: what it is compared with; empty if that is not installed.
        reference: how much the other took; None if it is not installed or failed.
    """

    section: str
    task: str
    size: str
    what: str
    value: float | None
    unit: str
    against: str = ""
    reference: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over reference."""
        if self.value is None or self.reference is None or self.reference < RESOLUTION.get(self.unit, 0.0):
            return None
        return self.value / self.reference


class Settings(NamedTuple):
    """What a user may choose.

    Attributes:
        sizes: instead of each section's own; empty for those.
        rounds: timing rounds; the median is reported.
        naive: whether the loop over tokens is timed at every size.
        device: "cpu" or "cuda".
    """

    sizes: tuple[Size, ...] = ()
    rounds: int = 5
    naive: bool = False
    device: str = "cpu"


class Job(NamedTuple):
    """A part of a section that shows as one step of progress."""

    title: str
    run: Callable[[], list[Row]]


def interleaved(works: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, float]:
    """Return the median time of each in milliseconds, over rounds in which each runs in turn, after a warm-up."""
    clock = CLOCKS[device]
    repeats = {}
    for name, work in works.items():
        once = clock(work, 1)
        if once < 1e3:  # else the first time's own costs hardly matter
            once = clock(work, 1)
        repeats[name] = max(1, math.ceil(SHORTEST_MS / max(once, 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(clock(work, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(work: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e3 * (time.perf_counter() - start) / repeats


def _milliseconds_on_gpu(work: Callable[[], object], repeats: int) -> float:
    """By events of the device's own clock, from when it has nothing else to do."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def _milliseconds_of_process(work: Callable[[], object], repeats: int) -> float:
    """CPU time of all threads, which other programs do not lengthen much."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return 1e3 * (time.process_time() - start) / repeats


CLOCKS = {"cpu": _milliseconds, "cpu time": _milliseconds_of_process, "cuda": _milliseconds_on_gpu}
"""The mean time of some runs of a work in milliseconds, by device."""


def product(device: str = "cpu") -> Callable[[], object]:
    """The matrix product that gives the machine's own rate: n×n by n×n in float32, n = `PRODUCT_N`."""
    a, b = torch.randn(2, PRODUCT_N, PRODUCT_N, device=device).unbind()
    return lambda: a @ b


def product_rate(milliseconds: float) -> float:
    """GFLOP/s of a `product` that took so long."""
    return 2 * PRODUCT_N**3 / milliseconds / 1e6
