r"""Settings of learned recall.

K = 8 pairs of a target and a distractor that overlap by ρ. Models train with $n_f \le 8$ distractor writes and
ρ ≤ 0.80, and are tested up to $n_f = 256$ and ρ = 0.95. The paper: §4.1, panels (c, d), and its appendix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from membydesign.data.recall import Collisions
from membydesign.data.seeds import generator
from membydesign.experiments.shared.addressed_runs import PAPER_TRAINING, AddressedRun, AddressedSettings
from membydesign.experiments.shared.addressed_sweep import OPEN, AddressedConfig, Choice

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.data.recall import Addressed
    from membydesign.experiments.shared.addressed import AddressedModel


@dataclass(frozen=True, kw_only=True)
class RecallSettings(AddressedSettings[Collisions]):
    r"""Settings that the experiment and its runs share.

    Attributes:
        test_distractor_writes: $n_f$ of panel (c), at ρ = `RecallRun.test_overlap`.
        test_overlaps: ρ of panel (d), at $n_f$ = `RecallRun.test_writes`.
    """

    task: Collisions = field(default_factory=Collisions)
    test_distractor_writes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    test_overlaps: tuple[float, ...] = (0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95)


@dataclass(frozen=True, kw_only=True)
class RecallRun(RecallSettings, AddressedRun[Collisions]):
    r"""Settings of one run.

    Attributes:
        distractor_writes: $n_f$ of training, one drawn for each batch.
        overlap: ρ of training, uniform.
        test_overlap: ρ of panel (c).
        test_writes: $n_f$ of panel (d).
        test_range_writes: $n_f$ of the test of more distractor writes, ρ as in training.
        test_range_overlap: ρ of the test of larger overlaps, $n_f$ as in training.
    """

    distractor_writes: tuple[int, ...] = (1, 2, 4, 8)
    overlap: tuple[float, float] = (0.60, 0.80)
    test_overlap: float = 0.80
    test_writes: int = 64
    test_range_writes: tuple[int, ...] = (16, 32, 64)
    test_range_overlap: tuple[float, float] = (0.85, 0.95)

    def training_batch(self, step: int) -> Addressed:
        """Draw the sequences of a step: $n_f$ for the batch, ρ for every pair."""
        rng = generator("recall", "train", self.seed, step)
        writes = self.distractor_writes[int(torch.randint(len(self.distractor_writes), (), generator=rng))]
        return self.task.sample(self.train.batch_size, writes, self.overlap, rng)

    def measure(self, model: AddressedModel, *, final: bool) -> dict[str, Any]:
        """Measure both panels, and after the last step also the tests over ranges."""
        rho, n_f = self.test_overlap, self.test_writes
        tests: dict[str, Any] = {
            "distractor_writes": {str(n): self._cell(model, n, (rho, rho)) for n in self.test_distractor_writes},
            "overlap": {f"{x:.2f}": self._cell(model, n_f, (x, x)) for x in self.test_overlaps},
        }
        if final:
            ranges = {
                "training_range": (self.distractor_writes, self.overlap),
                "more_distractor_writes": (self.test_range_writes, self.overlap),
                "larger_overlap": (self.distractor_writes, self.test_range_overlap),
            }
            for name, (writes, overlap) in ranges.items():
                cells = [self._cell(model, n, overlap) for n in writes]
                tests[name] = {key: sum(cell[key] for cell in cells) / len(cells) for key in cells[0]}
        return tests

    def _cell(self, model: AddressedModel, writes: int, overlap: tuple[float, float]) -> dict[str, float]:
        """Run one test, on the same sequences for every model and seed."""
        rng = generator("recall", "test", writes, *(f"{x:.4f}" for x in overlap))
        batches = [self.task.sample(size, writes, overlap, rng) for size in self.portions()]
        logits = torch.cat([model.answer(batch) for batch in batches])
        return metrics(logits, torch.cat([b.answers for b in batches]), torch.cat([b.rivals for b in batches]))


@dataclass(frozen=True, kw_only=True)
class RecallConfig(RecallSettings, AddressedConfig[Collisions]):
    """Settings of the experiment; by default the paper's."""

    run_type: ClassVar[type[RecallRun]] = RecallRun

    @property
    def longest(self) -> str:
        """$n_f$ at the end of panel (c)."""
        return str(self.test_distractor_writes[-1])

    @property
    def largest(self) -> str:
        """ρ at the end of panel (d)."""
        return f"{self.test_overlaps[-1]:.2f}"

    @property
    def edge(self) -> str:
        """The $n_f$ of panel (c) that is nearest to the most of training."""
        return str(min(self.test_distractor_writes, key=lambda n: abs(n - RecallRun.distractor_writes[-1])))

    @property
    def panels(self) -> dict[str, list[str]]:
        """The tests of both panels, as they are named in metrics."""
        return {
            "distractor_writes": [str(n) for n in self.test_distractor_writes],
            "overlap": [f"{x:.2f}" for x in self.test_overlaps],
        }


def metrics(logits: Tensor, answers: Tensor, rivals: Tensor) -> dict[str, float]:
    r"""Compute accuracy, margins and cross-entropy at the queries: logits [B,Q,L], labels [B,Q].

    The pairwise margin is $p_B - p_A$ under a softmax over the target's and the distractor's labels alone; the full
    margin the same difference under the softmax over all labels.
    """
    target, rival = (logits.gather(-1, labels[..., None])[..., 0] for labels in (answers, rivals))
    log_total = logits.logsumexp(-1)
    return {
        "accuracy": (logits.argmax(-1) == answers).float().mean().item(),
        "pairwise_margin": torch.tanh((target - rival) / 2).mean().item(),
        "full_margin": ((target - log_total).exp() - (rival - log_total).exp()).mean().item(),
        "cross_entropy": F.cross_entropy(logits.flatten(0, 1), answers.flatten()).item(),
    }


_paper = RecallConfig()
PRESETS = {
    "smoke": RecallConfig(
        seeds=2,
        train=replace(PAPER_TRAINING, steps=30, batch_size=32, learning_rate=3e-3),
        milestones=(10,),
        choices=(OPEN[0], Choice("bayesian_layer", query_writes=True, steps=10)),
        test_examples=16,
        test_distractor_writes=(1, 8, 32),
        test_overlaps=(0.60, 0.80, 0.95),
    ),
    "cpu": replace(_paper, choices=OPEN[:2]),
    "paper": _paper,
}
"""Two cores can do the paper's settings; `cpu` leaves out most of what the paper leaves open."""
