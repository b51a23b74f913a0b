"""Settings of random-key crowding.

n writes at random addresses of dimension D = 16, then eight queries. Models train at n/D ≤ 4 and are tested up to 16.
No memory can hold more than D associations exactly; the question is how gracefully it degrades. The paper: appendix on
random keys.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from membydesign.data.recall import RandomKeys
from membydesign.data.seeds import generator
from membydesign.experiments.shared.addressed_runs import PAPER_TRAINING, AddressedRun, AddressedSettings
from membydesign.experiments.shared.addressed_sweep import (
    OPEN,
    OPEN_CROWDING,
    SMALL_NOISE_CHOICES,
    AddressedConfig,
    Choice,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from membydesign.data.recall import Addressed
    from membydesign.experiments.shared.addressed import AddressedModel

SCALES = torch.logspace(-1.5, 0.5, 81)
"""The factors of logits among which the best calibrated is chosen: from 0.03 to 3.2."""


@dataclass(frozen=True, kw_only=True)
class CrowdingSettings(AddressedSettings[RandomKeys]):
    """Settings that the experiment and its runs share.

    Attributes:
        writes: n of training, one drawn for each batch.
        test_writes: n of the tests.
    """

    task: RandomKeys = field(default_factory=RandomKeys)
    writes: tuple[int, ...] = (16, 32, 48, 64)
    test_writes: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256)
    test_examples: int = 1024


@dataclass(frozen=True, kw_only=True)
class CrowdingRun(CrowdingSettings, AddressedRun[RandomKeys]):
    """Settings of one run."""

    def training_batch(self, step: int) -> Addressed:
        """Draw n for the batch, and its sequences."""
        rng = generator("crowding", "train", self.seed, step)
        writes = self.writes[int(torch.randint(len(self.writes), (), generator=rng))]
        return self.task.sample(self.train.batch_size, writes, rng)

    def measure(self, model: AddressedModel, *, final: bool) -> dict[str, Any]:
        """Measure at every n, on the same sequences for every model and seed."""
        del final
        return {str(n): self._cell(model, n) for n in self.test_writes}

    def _cell(self, model: AddressedModel, writes: int) -> dict[str, Any]:
        scale = best_scale(*answers_at(self, model.answer, writes, "validation"))
        with watched(model) as noises:
            logits, answers = answers_at(self, model.answer, writes, "test")
        return {
            "accuracy": (logits.argmax(-1) == answers).float().mean().item(),
            "cross_entropy": F.cross_entropy(logits, answers).item(),
            "calibrated_cross_entropy": F.cross_entropy(scale * logits, answers).item(),
            "best_scale": scale,
            "logit_deviation": logits.std(-1).mean().item(),
            "noises": {name: sum(values) / len(values) for name, values in noises.items()},
        }


@dataclass(frozen=True, kw_only=True)
class CrowdingConfig(CrowdingSettings, AddressedConfig[RandomKeys]):
    """Settings of the experiment; by default the paper's.

    Attributes:
        statistics_examples: sequences over which collisions are measured.
    """

    run_type: ClassVar[type[CrowdingRun]] = CrowdingRun

    choices: tuple[Choice, ...] = OPEN_CROWDING
    statistics_examples: int = 256

    @property
    def densities(self) -> dict[str, float]:
        """n/D of every n that is tested."""
        return {str(n): n / self.task.address_dim for n in self.test_writes}


def answers_at(
    settings: CrowdingSettings, answer: Callable[[Addressed], Tensor], writes: int, split: str
) -> tuple[Tensor, Tensor]:
    """Return logits, [N,L], and right labels, [N], at the queries of the sequences of a split with n = `writes`."""
    rng = generator("crowding", split, writes)
    batches = [settings.task.sample(size, writes, rng) for size in settings.portions()]
    logits = torch.cat([answer(batch) for batch in batches])
    return logits.flatten(0, 1), torch.cat([batch.answers for batch in batches]).flatten()


@contextmanager
def watched(model: AddressedModel) -> Iterator[dict[str, list[float]]]:
    """Collect the mean of every variance that the layers of a model compute, by name and number of the layer."""
    seen: dict[str, list[float]] = defaultdict(list)
    hooks = []
    for layer, mixer in enumerate(model.mixers, 1):
        modules: Any = mixer.noises
        for name, noise in modules.items():

            def record(_: Any, __: Any, value: Tensor | float, key: str = f"{name}_{layer}") -> None:
                seen[key].append(float(torch.as_tensor(value).mean()))

            hooks.append(noise.register_forward_hook(record))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def best_scale(logits: Tensor, answers: Tensor) -> float:
    """Return the factor of the logits, [N,L], with the least cross-entropy; below one if a model is overconfident."""
    losses = torch.stack([F.cross_entropy(scale * logits, answers) for scale in SCALES])
    return SCALES[losses.argmin()].item()


_paper = CrowdingConfig()
PRESETS = {
    "smoke": CrowdingConfig(
        seeds=2,
        train=replace(PAPER_TRAINING, steps=30, batch_size=32, learning_rate=3e-3),
        milestones=(10,),
        choices=(
            OPEN[0],
            Choice("bayesian_layer", query_writes=True, steps=10),
            Choice("bayesian_layer_no_floor_1e-5", seeds=2),
        ),
        test_writes=(16, 64, 128),
        test_examples=32,
        statistics_examples=16,
    ),
    "cpu": replace(_paper, choices=OPEN_CROWDING[:2]),
    "paper": _paper,
    "small-noise": replace(_paper, choices=(*OPEN_CROWDING, *SMALL_NOISE_CHOICES)),
}
"""Two cores can do the paper's settings; `cpu` leaves out most of what the paper leaves open, and `small-noise` adds
process noise without a floor: twelve more runs next to those of `paper`."""
