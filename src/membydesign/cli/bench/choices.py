"""The table from which the default backend and chunk size of the dense filter are chosen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from membydesign.cli.bench.problem import Size
from membydesign.cli.bench.timing import Job, Row, Settings, interleaved
from membydesign.cli.bench.works import TRAINING, Task, bayesian, prepare
from membydesign.ops.kalman import cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ("torch", "cpu")
CHUNK_SIZES = (1, 16, 32, 64)
"""Chunks of one token are the native code that goes token by token; torch has no such form."""

SIZES = tuple(Size(1, 4, 2048, D) for D in (8, 16, 32, 64, 128, 256))
DEFAULT = "default"


def available() -> tuple[str, ...]:
    """The backends that this machine has; one that it has not would silently run as another."""
    return tuple(name for name in BACKENDS if name != "cpu" or cpu.available(torch.float32, by_token=True))


def choices(settings: Settings) -> Iterator[Job]:
    """Every backend with every chunk size, and what runs by default, beside the fastest of them."""
    for task in TRAINING:
        for size in settings.sizes or SIZES:
            yield Job(f"{task} at {size}: backends and chunk sizes", partial(_choices, task, size, settings.rounds))


def _choices(task: Task, size: Size, rounds: int) -> list[Row]:
    ways = {
        f"{name} {C}": bayesian(backend=name, chunk_size=C)
        for name in available()
        for C in CHUNK_SIZES
        if C > 1 or name == "cpu"
    }
    works = {name: prepare(work, task, size) for name, work in {**ways, DEFAULT: bayesian()}.items()}
    times = interleaved(works, rounds)
    fastest = min(ways, key=times.__getitem__)
    return [Row("choices", task, str(size), n, times[n], "ms", fastest, times[fastest]) for n in times]
