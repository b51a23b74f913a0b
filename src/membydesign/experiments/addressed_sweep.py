"""Many runs of models with given addresses: which there are, and their tests as mean and deviation over seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from membydesign.experiments.addressed import COMPARED, UPDATES
from membydesign.experiments.addressed_runs import work
from membydesign.experiments.record import RecordTable
from membydesign.training import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from membydesign.experiments.addressed_runs import AddressedRun
    from membydesign.experiments.crowding import CrowdingConfig
    from membydesign.experiments.recall import RecallConfig
    from membydesign.experiments.workspace import Workspace


SHORT = 1000
"""Steps of most alternatives, to save time; the defaults are measured there too, so that both are compared as they are
after as many steps. In recall training is all but over by then; in crowding losses still fall, and what matters most is
run to the end (`OPEN_CROWDING`)."""


@dataclass(frozen=True)
class Choice:
    """One answer to what the paper leaves open.

    Attributes:
        update: a name of `UPDATES`.
        query_writes: whether query tokens write.
        seeds: how many seeds it is run with, at most.
        steps: of training, at most; None for as many as the others.
    """

    update: str
    query_writes: bool = False
    seeds: int = 1
    steps: int | None = None

    @property
    def key(self) -> str:
        """By which its results are found."""
        return f"{self.update}{'+query_writes' if self.query_writes else ''}"

    @property
    def title(self) -> str:
        """As tables and figures name it."""
        return f"{UPDATES[self.update].title}{', queries write' if self.query_writes else ''}"

    @property
    def default(self) -> str:
        """The update that it is an alternative to: the longest name that its own begins with."""
        return max((update for update in COMPARED if self.update.startswith(update)), key=len)

    def of_seeds(self, config: RecallConfig | CrowdingConfig) -> Iterator[dict[str, Any]]:
        """What all runs of an experiment are told, for every seed of this choice."""
        train = config.train
        if self.steps is not None:
            train = replace(train, steps=min(self.steps, train.steps))
        for seed in range(min(config.seeds, self.seeds)):
            yield {
                "update": self.update,
                "seed": seed,
                "train": train,
                "query_writes": self.query_writes,
                "milestones": tuple(step for step in config.milestones if step < train.steps),
                "test_examples": config.test_examples,
                "task": config.task,
            }


OPEN = (
    Choice("covariance_reset_learned"),
    Choice("bayesian_layer_from_069", steps=SHORT),
    Choice("bayesian_layer_diagonal_from_069", steps=SHORT),
    Choice("gla_style_from_half", steps=SHORT),
    *(Choice(update, query_writes=True, steps=SHORT) for update in COMPARED),
)
"""The answers that are run beside the defaults."""

_TO_THE_END = ("bayesian_layer_from_069", "bayesian_layer+query_writes", "deltanet_style+query_writes")

OPEN_CROWDING = (
    *(replace(choice, steps=None) if choice.key in _TO_THE_END else choice for choice in OPEN),
    *(
        Choice(f"{update}_unnormed")
        for update in ("bayesian_layer", "deltanet_style", "gla_style", "bayesian_layer_diagonal")
    ),
)
"""The same for crowding, some of them as long as the defaults, and readouts that see how strongly memories answer."""


class Spread(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.std:.3f}" if self.std else f"{self.mean:.3f}"


def spread(values: Sequence[float]) -> Spread:
    """Of one number over seeds; one seed deviates by nothing."""
    return Spread(mean(values), stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Results:
    """What all runs found.

    Attributes:
        found: metrics by name of run.
        by_choice: the metrics of each choice, one for each seed.
    """

    found: Mapping[str, dict[str, Any]]
    by_choice: Mapping[str, list[dict[str, Any]]]

    def test(self, choice: str, *path: str, step: int | None = None, seeds: int | None = None) -> Spread:
        """A number of the tests after a step (the last by default), over the seeds of a choice (or the first few)."""
        values = []
        for metrics in self.by_choice[choice][:seeds]:
            value: Any = metrics["tests"][str(metrics["steps"] if step is None else step)]
            for name in path:
                value = value[name]
            values.append(value)
        return spread(values)

    def beside(self, choice: Choice, *path: str) -> tuple[Spread, Spread]:
        """A number of the default and of the alternative to it, after as many steps and for the same seeds."""
        steps, seeds = self.by_choice[choice.key][0]["steps"], self.seeds(choice.key)
        return self.test(choice.default, *path, step=steps, seeds=seeds), self.test(choice.key, *path)

    def moves(self, choice: Choice, *path: str) -> str:
        """The same as text."""
        before, after = self.beside(choice, *path)
        return f"{before.mean:.3f} → {after.mean:.3f}"

    def each(self, choices: Sequence[str], *path: str) -> dict[str, float]:
        """The means of a number of the tests, by the titles of updates."""
        return {UPDATES[choice].title: self.test(choice, *path).mean for choice in choices}

    def seeds(self, choice: str) -> int:
        """How many there are of a choice."""
        return len(self.by_choice[choice])

    def of_choices(self, choices: Sequence[Choice], columns: Mapping[str, Sequence[str]]) -> RecordTable:
        """What the paper leaves open: some numbers of the tests, default → alternative.

        Args:
            choices: the alternatives, a row each.
            columns: where to find a number in the tests, by heading.
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
        """How numbers of the tests move with the length of training.

        Args:
            updates: a row each.
            steps: after which models were measured.
            columns: where to find a number in the tests, by heading.
            name: of the number.
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
        """The runs themselves: parameters, steps, loss and time."""
        rows = []
        for key, runs in self.by_choice.items():
            loss, seconds = (spread([run[name] for run in runs]) for name in ("training_loss", "seconds"))
            rows.append(
                [key, runs[0]["parameters"], len(runs), runs[0]["steps"], f"{loss.mean:.5f}", round(seconds.mean)]
            )
        headings = ["run", "parameters", "seeds", "steps", "training loss", "seconds per run"]
        total = sum(run["seconds"] for run in self.found.values()) / 60
        commits = ", ".join(sorted({run["commit"][:12] for run in self.found.values()}))
        note = (
            f"{len(self.found)} runs, {total:.0f} minutes of training over all sessions, on one thread each, without "
            f"the tests; made by commits {commits}."
        )
        return RecordTable("Training", headings, rows, note)


def run_all(runs: Mapping[str, Sequence[AddressedRun[Any]]], workspace: Workspace) -> Results:
    """Train whatever is not done yet.

    Args:
        runs: by choice, one for each seed.
        workspace: where.
    """
    by_seed = sorted((config for configs in runs.values() for config in configs), key=lambda config: config.seed)
    workspace.stage("training")
    found = workspace.sweep([Run(config.name, config, work) for config in by_seed])
    return Results(found, {key: [found[config.name] for config in configs] for key, configs in runs.items()})
