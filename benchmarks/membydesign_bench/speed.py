"""Time designs against their peers, against each kind of drift, and as sequences grow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from membydesign_bench.problem import GRID, Size
from membydesign_bench.timing import Job, Row, Settings, interleaved
from membydesign_bench.works import (
    OURS,
    TASKS,
    TRAINING,
    Task,
    bayesian,
    peers,
    prepare,
    rule_to_compare,
    transitions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOP_SIZE = Size(1, 4, 2048, 64)
"""Where the loop over tokens, which is slow, is timed even if nobody asks."""

LOOP_GIB = 8.0
"""The most memory that the loop may take: its backward keeps about twelve D×D matrices for each token and head."""

TRANSITION_SIZES = (Size(1, 4, 2048, 64), Size(1, 4, 2048, 128))
GROWTH_SIZE = Size(1, 4, 2048, 64)
GROWTH = 32
"""How many times longer the long sequence is: 65,536 tokens to 2,048."""


def speed(settings: Settings) -> Iterator[Job]:
    """Compare every design with its peer, and the Bayesian Layer also with its own loop over tokens."""
    for task in TASKS:
        for size in settings.sizes or GRID:
            for rule in peers(settings.device):
                names = tuple(name for name in OURS if rule_to_compare(name, task) == rule)
                if names:
                    loop = "bayesian_layer" in names and (settings.naive or size == LOOP_SIZE) and _loop_can(task, size)
                    yield Job(
                        f"{task} at {size}: {', '.join(names)}",
                        partial(_speed, task, size, names, rule, settings, loop),
                    )


def _loop_can(task: Task, size: Size) -> bool:
    kept = 12 * 4 * size.B * size.H * size.T * size.D**2 / 2**30
    return task == "forward" or (task == "forward+backward" and kept <= LOOP_GIB)


def _speed(task: Task, size: Size, names: tuple[str, ...], rule: str, settings: Settings, loop: bool) -> list[Row]:
    peer = peers(settings.device)[rule]()
    works = {name: OURS[name] for name in names}
    if peer is not None:
        works["peer"] = peer
    if loop:
        works["loop"] = bayesian("its loop over tokens", method="recurrent")
    ready = {name: prepare(work, task, size, settings.device) for name, work in works.items()}
    times = interleaved(ready, settings.rounds, settings.device)
    against = (peer.title if peer else "", times.get("peer"))
    rows = [Row("speed", task, str(size), OURS[n].title, times[n], "ms", *against) for n in names]
    if loop:
        ours = OURS["bayesian_layer"].title, times["bayesian_layer"]
        rows.append(Row("speed", task, str(size), *ours, "ms", works["loop"].title, times["loop"]))
    return rows


def transition(settings: Settings) -> Iterator[Job]:
    """Compare the Bayesian Layer with a decay per row, and with damped rotations, with one decay for all rows."""
    sizes = settings.sizes or TRANSITION_SIZES
    for size in sizes:
        if size.D % 2:
            raise ValueError(f"--size: expected an even D for transitions, which turn pairs of rows, got '{size}'")
    for task in TRAINING:
        for size in sizes:
            yield Job(f"{task} at {size}: transitions", partial(_transition, task, size, settings))


def _transition(task: Task, size: Size, settings: Settings) -> list[Row]:
    ready = {name: prepare(work, task, size, settings.device) for name, work in transitions().items()}
    times = interleaved(ready, settings.rounds, settings.device)
    first, *others = times
    return [Row("transitions", task, str(size), n, times[n], "ms", first, times[first]) for n in others]


def growth(settings: Settings) -> Iterator[Job]:
    """Compare the Bayesian Layer's time per token on a long sequence with that on a short one."""
    for task in TRAINING:
        for size in settings.sizes or (GROWTH_SIZE,):
            yield Job(f"{task} at {size}: growth with T", partial(_growth, task, size, settings))


def _growth(task: Task, short: Size, settings: Settings) -> list[Row]:
    sizes = {f"T = {T:,}": short._replace(T=T) for T in (short.T, GROWTH * short.T)}
    ours, device = OURS["bayesian_layer"], settings.device
    ready = {name: prepare(ours, task, size, device) for name, size in sizes.items()}
    times = interleaved(ready, settings.rounds, device)
    each = {name: 1e3 * times[name] / (size.B * size.T) for name, size in sizes.items()}
    (small, reference), (large, value) = each.items()
    return [Row("growth", task, str(sizes[large]), large, value, "µs/token", small, reference)]
