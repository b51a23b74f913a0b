"""One run of learned recall: a model trained on controlled collisions, and measured far beyond them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from membydesign.data.recall import Addressed, Collisions
from membydesign.data.seeds import generator
from membydesign.experiments.addressed import UPDATES, AddressedModel, losses
from membydesign.experiments.record import Provenance
from membydesign.training import TrainSettings, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from membydesign.training import Progress


@dataclass(frozen=True)
class RecallRun:
    r"""Settings of one run.

    Attributes:
        update: a name of `UPDATES`.
        seed: of weights and training sequences; models of one seed see the same sequences.
        query_writes: whether query tokens write.
        train: optimiser, batch and steps.
        milestones: steps after which the model is measured, besides the last.
        distractor_writes: $n_f$ of training, one drawn for each batch.
        overlap: ρ of training, uniform.
        test_examples: sequences of each test.
        test_distractor_writes: $n_f$ of panel (c), at ρ = `test_overlap`.
        test_overlap: ρ of panel (c).
        test_overlaps: ρ of panel (d), at $n_f$ = `test_writes`.
        test_writes: $n_f$ of panel (d).
        test_range_writes: $n_f$ of the test of more distractor writes, ρ as in training.
        test_range_overlap: ρ of the test of larger overlaps, $n_f$ as in training.
    """

    update: str
    seed: int
    train: TrainSettings
    query_writes: bool = False
    milestones: tuple[int, ...] = ()
    task: Collisions = field(default_factory=Collisions)
    distractor_writes: tuple[int, ...] = (1, 2, 4, 8)
    overlap: tuple[float, float] = (0.60, 0.80)
    test_examples: int = 512
    test_distractor_writes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    test_overlap: float = 0.80
    test_overlaps: tuple[float, ...] = (0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95)
    test_writes: int = 64
    test_range_writes: tuple[int, ...] = (16, 32, 64)
    test_range_overlap: tuple[float, float] = (0.85, 0.95)

    def batch(self, step: int) -> dict[str, Tensor]:
        """The training batch of a step."""
        rng = generator("recall", "train", self.seed, step)
        writes = self.distractor_writes[int(torch.randint(len(self.distractor_writes), (), generator=rng))]
        batch = self.task.sample(self.train.batch_size, writes, self.overlap, rng)
        return {"tokens": batch.tokens, "addresses": batch.addresses, "answers": batch.answers}

    def model(self) -> AddressedModel:
        """The model before training; models of one seed start from the same weights where they have the same."""
        torch.manual_seed(self.seed)
        return AddressedModel(
            UPDATES[self.update],
            self.task.token_dim,
            self.task.labels,
            address_dim=self.task.address_dim,
            query_writes=self.query_writes,
        )


def work(config: RecallRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train and measure; the metrics of the run."""
    model = config.model()
    measured = {}
    trained = None
    for step in sorted({*config.milestones, config.train.steps}):
        trained = train(
            model, config.batch, losses, config.train, seed=config.seed, directory=directory, until=step, watch=watch
        )
        measured[str(step)] = measure(model, config, final=step == config.train.steps)
    assert trained is not None
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": trained.step,
        "training_loss": trained.loss,
        "seconds": round(trained.seconds, 1),
        "commit": Provenance.now("recall", config.update, trained.seconds).commit,
        "tests": measured,
    }


def measure(model: AddressedModel, config: RecallRun, *, final: bool) -> dict[str, Any]:
    """Both panels, and after the last step the tests over ranges too."""
    rho, n_f = config.test_overlap, config.test_writes
    tests: dict[str, Any] = {
        "distractor_writes": {str(n): _cell(model, config, n, (rho, rho)) for n in config.test_distractor_writes},
        "overlap": {f"{x:.2f}": _cell(model, config, n_f, (x, x)) for x in config.test_overlaps},
    }
    if final:
        ranges = {
            "training_range": (config.distractor_writes, config.overlap),
            "more_distractor_writes": (config.test_range_writes, config.overlap),
            "larger_overlap": (config.distractor_writes, config.test_range_overlap),
        }
        for name, (writes, overlap) in ranges.items():
            cells = [_cell(model, config, n, overlap) for n in writes]
            tests[name] = {key: sum(cell[key] for cell in cells) / len(cells) for key in cells[0]}
    return tests


def _cell(model: AddressedModel, config: RecallRun, writes: int, overlap: tuple[float, float]) -> dict[str, float]:
    """One test: the same sequences for every model and seed."""
    rng = generator("recall", "test", writes, *(f"{x:.4f}" for x in overlap))
    sizes = [min(64, config.test_examples - start) for start in range(0, config.test_examples, 64)]
    parts = []
    model.eval()
    with torch.no_grad():
        for size in sizes:
            batch = config.task.sample(size, writes, overlap, rng)
            parts.append((model.answer(batch), batch))
    return metrics(
        torch.cat([logits for logits, _ in parts]), Addressed(*map(torch.cat, zip(*(b for _, b in parts), strict=True)))
    )


def metrics(logits: Tensor, batch: Addressed) -> dict[str, float]:
    r"""Accuracy, margins and cross-entropy at the queries.

    The pairwise margin is $p_B - p_A$ under a softmax over the target's and the distractor's labels alone; the full
    margin the same difference under the softmax over all labels.
    """
    target = logits.gather(-1, batch.answers[..., None])[..., 0]
    rival = logits.gather(-1, batch.rivals[..., None])[..., 0]
    log_total = logits.logsumexp(-1)
    return {
        "accuracy": (logits.argmax(-1) == batch.answers).float().mean().item(),
        "pairwise_margin": torch.tanh((target - rival) / 2).mean().item(),
        "full_margin": ((target - log_total).exp() - (rival - log_total).exp()).mean().item(),
        "cross_entropy": F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten()).item(),
    }
