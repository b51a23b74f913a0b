"""The table from which the default backend and chunk size of the dense filter are chosen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from membydesign.filter.native import dense
from membydesign_bench.problem import Size
from membydesign_bench.timing import Job, Row, Settings, interleaved
from membydesign_bench.works import TRAINING, Task, bayesian, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ("torch", "native")
CHUNK_SIZES = (1, 16, 32, 64)
"""Chunks of one token are the native code that goes token by token; torch has no such form."""

SIZES = tuple(Size(1, 4, 2048, D) for D in (8, 16, 32, 64, 128, 256))
DEFAULT = "default"


def available() -> tuple[str, ...]:
    """The backends that this machine has; one that it has not would silently run as another."""
    return tuple(name for name in BACKENDS if name != "native" or dense.available(torch.float32, by_token=True))


def choices(settings: Settings) -> Iterator[Job]:
    """Compare every backend with every chunk size, and the default, with the fastest of them."""
    for task in TRAINING:
        for size in settings.sizes or SIZES:
            yield Job(f"{task} at {size}: backends and chunk sizes", partial(_choices, task, size, settings.rounds))


def _choices(task: Task, size: Size, rounds: int) -> list[Row]:
    candidates = {
        f"{name} {C}": bayesian(backend=name, chunk_size=C)
        for name in available()
        for C in CHUNK_SIZES
        if C > 1 or name == "native"
    }
    works = {name: prepare(work, task, size) for name, work in {**candidates, DEFAULT: bayesian()}.items()}
    times = interleaved(works, rounds)
    fastest = min(candidates, key=times.__getitem__)
    return [Row("choices", task, str(size), n, times[n], "ms", fastest, times[fastest]) for n in times]
