"""Settings of the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from membydesign.design import catalogue
from membydesign.errors import FilterError
from membydesign.experiments.compare.calibration import Calibration
from membydesign.experiments.compare.collision import Collision
from membydesign.experiments.compare.model import Crowding, Recall
from membydesign.experiments.compare.sizes import Cannot
from membydesign.reports.provenance import commit
from membydesign.training import Diverged, Run, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from membydesign.training import Progress

BUDGET = 520
"""Numbers kept per head: those of the Bayesian Layer with D = M = 16, and a few for scales and counts."""


@dataclass(frozen=True, kw_only=True)
class CompareRun:
    """Settings of one design on one task with one seed.

    Attributes:
        design: a name of the catalogue.
        task: the task's settings.
        seed: for weights and data.
    """

    design: str
    task: Collision | Recall | Crowding | Calibration
    seed: int


def work(config: CompareRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Do one run; a design that cannot do the task, or fails at it, says why."""
    made_by = {"commit": commit()}
    task = config.task
    try:
        if isinstance(task, Recall | Crowding):
            return {**made_by, **task.run(config.design, config.seed, directory, watch)}
        return {**made_by, **task.measure(config.design, config.seed)}
    except Cannot as reason:
        return {**made_by, "cannot": str(reason)}
    except (Diverged, FilterError) as error:
        return {**made_by, "failed": str(error)}


def _trained(steps: int) -> TrainSettings:
    return TrainSettings(
        steps=steps, batch_size=32, learning_rate=3e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup=min(20, steps)
    )


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Settings of the comparison.

    Attributes:
        designs: names of the catalogue; empty for all that it has when the command runs.
        seeds: seeds of every task that draws random numbers; the collision has one.
        collision: exact, nothing is learned.
        recall: learned, under collisions.
        crowding: learned, with more and more keys.
        calibration: predictions under noise that was not told; nothing is learned.
    """

    designs: tuple[str, ...] = ()
    seeds: int = 3
    collision: Collision = field(default_factory=Collision)
    recall: Recall = field(default_factory=lambda: Recall(budget=BUDGET, train=_trained(80)))
    crowding: Crowding = field(default_factory=lambda: Crowding(budget=BUDGET, train=_trained(200)))
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        for name in self.designs:
            if name not in catalogue:
                raise ValueError(f"designs: expected names of the catalogue ({', '.join(catalogue)}), got {name!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The designs that are compared, in the order of the catalogue."""
        return tuple(name for name in catalogue if not self.designs or name in self.designs)

    def runs(self) -> list[Run]:
        """Return every run, those of the first seed first."""
        runs = []
        for seed in range(self.seeds):
            for task in TASKS:
                settings = getattr(self, task)
                if seed == 0 or task in RANDOM:
                    kept = {"task": settings, "seed": seed}
                    runs += [Run(folder(task, n, seed), CompareRun(design=n, **kept), work) for n in self.names]
        return runs


def folder(task: str, design: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{task}-{design}-seed{seed}"


TASKS = tuple(each.name for each in fields(CompareConfig) if each.name not in ("designs", "seeds"))
"""The tasks by name."""

RANDOM = ("recall", "crowding", "calibration")
"""Those that draw random numbers, and have seeds."""

PRESETS = {
    "smoke": CompareConfig(
        recall=Recall(budget=BUDGET, train=_trained(3), test_examples=4, tests=((1, 0.80), (4, 0.95))),
        crowding=Crowding(budget=BUDGET, train=_trained(3), test_examples=4, tests=(16, 32), writes=(8, 16)),
        calibration=Calibration(streams=4, writes=32),
    ),
    "cpu": CompareConfig(),
}
"""`cpu` takes a minute or two per design on one core, most of it for calibration; low rank takes several."""
