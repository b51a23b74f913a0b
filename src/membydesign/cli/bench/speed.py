"""Time: beside the peers, for each kind of drift, and as sequences grow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from membydesign.cli.bench.problem import GRID, Size
from membydesign.cli.bench.timing import Job, Row, Settings, interleaved
from membydesign.cli.bench.works import (
    OURS,
    PEERS,
    TASKS,
    TRAINING,
    Task,
    bayesian,
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
    """Every design beside its peer; the Bayesian Layer also beside its own loop over tokens."""
    for task in TASKS:
        for size in settings.sizes or GRID:
            for rule in PEERS:
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
    peer = PEERS[rule]()
    works = {name: OURS[name] for name in names}
    if peer is not None:
        works["peer"] = peer
    if loop:
        works["loop"] = bayesian("its loop over tokens", method="recurrent")
    times = interleaved({name: prepare(work, task, size) for name, work in works.items()}, settings.rounds)
    against = (peer.title if peer else "", times.get("peer"))
    rows = [Row("speed", task, str(size), OURS[n].title, times[n], "ms", *against) for n in names]
    if loop:
        ours = OURS["bayesian_layer"].title, times["bayesian_layer"]
        rows.append(Row("speed", task, str(size), *ours, "ms", works["loop"].title, times["loop"]))
    return rows


def transition(settings: Settings) -> Iterator[Job]:
    """The Bayesian Layer with a decay of each row, and with damped rotations, beside one decay for all rows."""
    sizes = settings.sizes or TRANSITION_SIZES
    for size in sizes:
        if size.D % 2:
            raise ValueError(f"--size: expected an even D for transitions, which turn pairs of rows, got '{size}'")
    for task in TRAINING:
        for size in sizes:
            yield Job(f"{task} at {size}: transitions", partial(_transition, task, size, settings.rounds))


def _transition(task: Task, size: Size, rounds: int) -> list[Row]:
    times = interleaved({name: prepare(work, task, size) for name, work in transitions().items()}, rounds)
    first, *others = times
    return [Row("transitions", task, str(size), n, times[n], "ms", first, times[first]) for n in others]


def growth(settings: Settings) -> Iterator[Job]:
    """The Bayesian Layer's time for each token of a long sequence beside that of a short one."""
    for task in TRAINING:
        for size in settings.sizes or (GROWTH_SIZE,):
            yield Job(f"{task} at {size}: growth with T", partial(_growth, task, size, settings.rounds))


def _growth(task: Task, short: Size, rounds: int) -> list[Row]:
    sizes = {f"T = {T:,}": short._replace(T=T) for T in (short.T, GROWTH * short.T)}
    times = interleaved({name: prepare(OURS["bayesian_layer"], task, size) for name, size in sizes.items()}, rounds)
    each = {name: 1e3 * times[name] / (size.B * size.T) for name, size in sizes.items()}
    (small, reference), (large, value) = each.items()
    return [Row("growth", task, str(sizes[large]), large, value, "µs/token", small, reference)]
