"""Do many runs of models whose addresses are inputs, and summarise their tests over seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from membydesign.experiments.shared.addressed import COMPARED, SMALL_NOISE, UPDATES
from membydesign.experiments.shared.addressed_runs import PAPER_TRAINING, AddressedRun, AddressedSettings, Task, work
from membydesign.experiments.shared.settings import shared_values
from membydesign.reports.record import RecordTable
from membydesign.training import Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.experiments.shared.run_context import RunContext


SHORT = 1000
"""Steps of most alternatives, to save time; the defaults are measured after as many steps, for a fair comparison. In
recall, training has nearly converged by then; in crowding, losses still fall, so the most important alternatives are
trained to the end (`OPEN_CROWDING`)."""


@dataclass(frozen=True)
class Choice:
    """An alternative to a default where the paper is silent.

    Attributes:
        update: a name of `UPDATES`.
        query_writes: whether query tokens write.
        seeds: the most seeds that it is run with.
        steps: the most training steps; None for as many as the others.
    """

    update: str
    query_writes: bool = False
    seeds: int = 1
    steps: int | None = None

    @property
    def key(self) -> str:
        """The key of its results."""
        return f"{self.update}{'+query_writes' if self.query_writes else ''}"

    @property
    def title(self) -> str:
        """Its name in tables and figures."""
        return f"{UPDATES[self.update].title}{', queries write' if self.query_writes else ''}"

    @property
    def default(self) -> str:
        """The update that it is an alternative to: the longest name that is a prefix of its own."""
        return max((update for update in COMPARED if self.update.startswith(update)), key=len)


OPEN = (
    Choice("covariance_reset_learned"),
    Choice("bayesian_layer_from_069", steps=SHORT),
    Choice("bayesian_layer_diagonal_from_069", steps=SHORT),
    Choice("gla_style_from_half", steps=SHORT),
    *(Choice(update, query_writes=True, steps=SHORT) for update in COMPARED),
)
"""The alternatives that are run in addition to the defaults."""

_TO_THE_END = ("bayesian_layer_from_069", "bayesian_layer+query_writes", "deltanet_style+query_writes")

SMALL_NOISE_CHOICES = tuple(Choice(name, seeds=3) for name in SMALL_NOISE)
"""Process noise without a floor, and as good as none."""

OPEN_CROWDING = (
    *(replace(choice, steps=None) if choice.key in _TO_THE_END else choice for choice in OPEN),
    *(
        Choice(f"{update}_unnormed")
        for update in ("bayesian_layer", "deltanet_style", "gla_style", "bayesian_layer_diagonal")
    ),
)
"""The same for crowding, some trained as long as the defaults, and readouts that see how strongly memories answer."""


@dataclass(frozen=True, kw_only=True)
class AddressedConfig(AddressedSettings[Task]):
    """Settings of an experiment.

    Attributes:
        run_type: the class of its runs.
        seeds: number of seeds.
        compared: the updates that the paper compares.
        choices: alternatives where the paper is silent.
    """

    run_type: ClassVar[type[AddressedRun[Any]]]

    seeds: int = 3
    compared: tuple[str, ...] = COMPARED
    choices: tuple[Choice, ...] = OPEN

    @property
    def share_of_paper(self) -> float:
        """Sequences that each model saw in training, as a fraction of the paper's."""
        return self.train.steps * self.train.batch_size / (PAPER_TRAINING.steps * PAPER_TRAINING.batch_size)

    def runs(self, choice: Choice) -> list[Any]:
        """Return the runs of a choice, one per seed."""
        steps = self.train.steps if choice.steps is None else min(choice.steps, self.train.steps)
        shared = shared_values(self.run_type, self) | {
            "update": choice.update,
            "query_writes": choice.query_writes,
            "train": replace(self.train, steps=steps),
            "milestones": tuple(step for step in self.milestones if step < steps),
        }
        return [self.run_type(**shared, seed=seed) for seed in range(min(self.seeds, choice.seeds))]

    def run_all(self, context: RunContext) -> Results:
        """Do every run that is not finished yet; return the results of all."""
        choices = [*(Choice(update, seeds=self.seeds) for update in self.compared), *self.choices]
        runs = {choice.key: self.runs(choice) for choice in choices}
        by_seed = sorted((run for same in runs.values() for run in same), key=lambda run: run.seed)
        context.stage("training")
        metrics = context.sweep([Run(run.name, run, work) for run in by_seed])
        return Results(metrics, {key: [metrics[run.name] for run in same] for key, same in runs.items()})


class Spread(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.std:.3f}" if self.std else f"{self.mean:.3f}"


def spread(values: Sequence[float]) -> Spread:
    """Return mean and deviation over seeds; the deviation of one seed is zero."""
    return Spread(mean(values), stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Results:
    """The metrics of all runs.

    Attributes:
        metrics: metrics by name of run.
        by_choice: the metrics of each choice, one per seed.
    """

    metrics: Mapping[str, dict[str, Any]]
    by_choice: Mapping[str, list[dict[str, Any]]]

    def test(self, choice: str, *path: str, step: int | None = None, seeds: int | None = None) -> Spread:
        """Return a number of the tests after a step (by default the last), over all or the first seeds of a choice."""
        values = []
        for metrics in self.by_choice[choice][:seeds]:
            value: Any = metrics["tests"][str(metrics["steps"] if step is None else step)]
            for name in path:
                value = value[name]
            values.append(value)
        return spread(values)

    def compared(self, choice: Choice, *path: str) -> tuple[Spread, Spread]:
        """Return a number of the default and of its alternative, after as many steps and for the same seeds."""
        steps, seeds = self.by_choice[choice.key][0]["steps"], self.seeds(choice.key)
        return self.test(choice.default, *path, step=steps, seeds=seeds), self.test(choice.key, *path)

    def moves(self, choice: Choice, *path: str) -> str:
        """Format the change from default to alternative."""
        before, after = self.compared(choice, *path)
        return f"{before.mean:.3f} → {after.mean:.3f}"

    def each(self, choices: Sequence[str], *path: str) -> dict[str, float]:
        """Return the means of a number of the tests by title of update."""
        return {UPDATES[choice].title: self.test(choice, *path).mean for choice in choices}

    def seeds(self, choice: str) -> int:
        """Return the number of seeds of a choice."""
        return len(self.by_choice[choice])

    def of_choices(self, choices: Sequence[Choice], columns: Mapping[str, Sequence[str]]) -> RecordTable:
        """Tabulate what the paper leaves open: some numbers of the tests, default → alternative.

        Args:
            choices: the alternatives, a row each.
            columns: the path of a number in the tests, by heading.
        """
        rows = []
        for choice in choices:
            runs = self.by_choice[choice.key]
            moved = [self.moves(choice, *path) for path in columns.values()]
            rows.append([choice.title, runs[0]["steps"], len(runs), *moved])
        note = "Default → alternative, after as many steps and for the same seeds."
        return RecordTable("What the paper leaves open", ["alternative", "steps", "seeds", *columns], rows, note)

    def of_lengths(
        self, updates: Sequence[str], steps: Sequence[int], columns: Mapping[str, Sequence[str]], name: str
    ) -> RecordTable:
        """Tabulate how numbers of the tests change with the length of training.

        Args:
            updates: a row each.
            steps: the steps after which models were measured.
            columns: the path of a number in the tests, by heading.
            name: the name of the number.
        """
        rows = [
            [
                UPDATES[update].title,
                *(str(self.test(update, *path, step=s)) for path in columns.values() for s in steps),
            ]
            for update in updates
        ]
        headings = ["update", *(f"{heading}, {step} steps" for heading in columns for step in steps)]
        return RecordTable(f"The length of training: {name}", headings, rows)

    def training(self) -> RecordTable:
        """Tabulate the runs: parameters, steps, loss and time."""
        rows = []
        for key, runs in self.by_choice.items():
            loss, seconds = (spread([run[name] for run in runs]) for name in ("training_loss", "seconds"))
            rows.append(
                [key, runs[0]["parameters"], len(runs), runs[0]["steps"], f"{loss.mean:.5f}", round(seconds.mean)]
            )
        headings = ["run", "parameters", "seeds", "steps", "training loss", "seconds per run"]
        total = sum(run["seconds"] for run in self.metrics.values()) / 60
        commits = ", ".join(sorted({run["commit"][:12] for run in self.metrics.values()}))
        note = (
            f"{len(self.metrics)} runs, {total:.0f} minutes of training over all sessions, on one thread each, without "
            f"the tests; made by commits {commits}."
        )
        return RecordTable("Training", headings, rows, note)
