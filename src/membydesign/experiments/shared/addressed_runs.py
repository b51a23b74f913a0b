"""Do one run of a model whose addresses are inputs: train it in stages, and measure it after each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from membydesign.data.recall import Collisions, RandomKeys
from membydesign.experiments.shared.addressed import UPDATES, AddressedModel, losses
from membydesign.reports.provenance import commit
from membydesign.training import TrainSettings, train_in_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from membydesign.data.recall import Addressed
    from membydesign.training import Progress

Task = TypeVar("Task", Collisions, RandomKeys)

PAPER_TRAINING = TrainSettings(
    steps=2500, batch_size=256, learning_rate=3e-4, betas=(0.9, 0.999), weight_decay=1e-4, decayed="all", clip=1.0
)
"""The paper's optimiser for recall and crowding: one rate for all models, no schedule, every parameter decays."""


@dataclass(frozen=True, kw_only=True)
class AddressedSettings(Generic[Task]):
    """Settings that an experiment and its runs share.

    Attributes:
        task: what sequences are drawn from.
        train: optimiser, batch size and steps.
        milestones: steps after which models are measured, besides the last.
        test_examples: sequences of each test.
    """

    task: Task
    train: TrainSettings = PAPER_TRAINING
    milestones: tuple[int, ...] = (500, 1000)
    test_examples: int = 512

    def portions(self, size: int = 64) -> Iterator[int]:
        """Split the number of test sequences into portions that fit in memory."""
        for start in range(0, self.test_examples, size):
            yield min(size, self.test_examples - start)


@dataclass(frozen=True, kw_only=True)
class AddressedRun(AddressedSettings[Task], ABC):
    """Settings of one run.

    Attributes:
        update: a name of `UPDATES`.
        seed: for weights and training sequences; models of one seed see the same sequences.
        query_writes: whether query tokens write.
    """

    update: str
    seed: int
    query_writes: bool = False

    @abstractmethod
    def training_batch(self, step: int) -> Addressed:
        """Draw the sequences of a step."""

    @abstractmethod
    def measure(self, model: AddressedModel, *, final: bool) -> dict[str, Any]:
        """Run the tests of a milestone, or all tests after the last step."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.update}{'+query_writes' if self.query_writes else ''}-seed{self.seed}"

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the training batch of a step."""
        batch = self.training_batch(step)
        return {"tokens": batch.tokens, "addresses": batch.addresses, "answers": batch.answers}

    def model(self) -> AddressedModel:
        """Build the untrained model."""
        torch.manual_seed(self.seed)
        return AddressedModel(
            UPDATES[self.update],
            self.task.token_dim,
            self.task.labels,
            address_dim=self.task.address_dim,
            query_writes=self.query_writes,
        )


def work(config: AddressedRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train and measure; return the metrics of the run."""
    model, made_by = config.model(), commit()

    @torch.no_grad()
    def measure(step: int) -> dict[str, Any]:
        return config.measure(model.eval(), final=step == config.train.steps)

    trained, tests = train_in_stages(
        model,
        config.batch,
        losses,
        config.train,
        milestones=config.milestones,
        measure=measure,
        seed=config.seed,
        directory=directory,
        watch=watch,
    )
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": trained.step,
        "training_loss": trained.loss,
        "seconds": round(trained.seconds, 1),
        "commit": made_by,
        "tests": tests,
    }
