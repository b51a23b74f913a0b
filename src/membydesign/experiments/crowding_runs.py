"""One run of random-key crowding: a model trained at n/D ≤ 4, and measured up to n/D = 16."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from membydesign.data.recall import RandomKeys
from membydesign.data.seeds import generator
from membydesign.experiments.addressed_runs import AddressedRun

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.data.recall import Addressed
    from membydesign.experiments.addressed import AddressedModel

SCALES = torch.logspace(-1.5, 0.5, 81)
"""The factors of logits among which the best calibrated is looked for: from 0.03 to 3.2."""


@dataclass(frozen=True)
class CrowdingRun(AddressedRun[RandomKeys]):
    """Settings of one run.

    Attributes:
        writes: n of training, one drawn for each batch.
        test_writes: n of the tests.
    """

    experiment: ClassVar[str] = "crowding"

    task: RandomKeys = field(default_factory=RandomKeys, kw_only=True)
    writes: tuple[int, ...] = (16, 32, 48, 64)
    test_writes: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256)

    def training_batch(self, step: int) -> Addressed:
        """The sequences of a step: n is drawn for the batch."""
        rng = generator("crowding", "train", self.seed, step)
        writes = self.writes[int(torch.randint(len(self.writes), (), generator=rng))]
        return self.task.sample(self.train.batch_size, writes, rng)

    def measure(self, model: AddressedModel, *, final: bool) -> dict[str, Any]:
        """Every n; the same sequences for every model and seed."""
        del final
        return {str(n): self._cell(model, n) for n in self.test_writes}

    def _cell(self, model: AddressedModel, writes: int) -> dict[str, float]:
        logits, answers = self._answers(model, writes, "test")
        scale = best_scale(*self._answers(model, writes, "validation"))
        return {
            "accuracy": (logits.argmax(-1) == answers).float().mean().item(),
            "cross_entropy": F.cross_entropy(logits, answers).item(),
            "calibrated_cross_entropy": F.cross_entropy(scale * logits, answers).item(),
            "best_scale": scale,
            "logit_deviation": logits.std(-1).mean().item(),
        }

    def _answers(self, model: AddressedModel, writes: int, split: str) -> tuple[Tensor, Tensor]:
        rng = generator("crowding", split, writes)
        batches = [self.task.sample(size, writes, rng) for size in self.portions()]
        logits = torch.cat([model.answer(batch) for batch in batches])
        return logits.flatten(0, 1), torch.cat([batch.answers for batch in batches]).flatten()


def best_scale(logits: Tensor, answers: Tensor) -> float:
    """The factor of the logits, [N,L], with the least cross-entropy: below one if a model is too sure of itself."""
    losses = torch.stack([F.cross_entropy(scale * logits, answers) for scale in SCALES])
    return SCALES[losses.argmin()].item()
