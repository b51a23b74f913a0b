"""Random-key crowding without learning: what the update of one memory can do, with one-hot labels as values.

Reads are logits up to one factor, chosen on validation sequences for each n. Nothing else is fitted, except the gain of
the delta rule, which is also chosen on validation sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from membydesign.design import catalogue
from membydesign.experiments.crowding.config import answers_at
from membydesign.experiments.shared.addressed import UPDATES, WRITE_NOISE
from membydesign.filter import filter_sequence

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.data.recall import Addressed
    from membydesign.design import Design
    from membydesign.experiments.crowding.config import CrowdingConfig

PROCESS_NOISES = (0.05, 1e-3, 1e-4, 1e-6, 0.0)
GAINS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
SCALES = torch.logspace(-1.5, 2.5, 161)
"""The factors of logits among which the best is chosen."""


def unlearned(config: CrowdingConfig) -> dict[str, dict[str, dict[str, float]]]:
    """Measure every memory at every n: {title: {n: {"cross_entropy", "accuracy", …}}}."""
    dense = UPDATES["bayesian_layer"].design
    fixed: dict[str, tuple[Design, dict[str, Any]]] = {
        f"exact filter, ℓ² = {noise:g}": (dense, {"process_noise": noise, "write_noise": WRITE_NOISE})
        for noise in PROCESS_NOISES
    }
    fixed["linear attention"] = (catalogue["linear_attention"], {"prior_variance": 1.0, "write_noise": 0.0})
    results = {
        title: {str(n): _test(config, n, design, step) for n in config.test_writes}
        for title, (design, step) in fixed.items()
    }
    results["delta rule, best constant gain"] = {str(n): _best_delta(config, n) for n in config.test_writes}
    return results


def _best_delta(config: CrowdingConfig, n: int) -> dict[str, float]:
    design = catalogue["deltanet"]
    steps: dict[float, dict[str, Any]] = {gain: {"prior_variance": 1.0, "write_noise": 1 / gain - 1} for gain in GAINS}
    losses = {
        gain: _scaled(*unlearned_answers(config, n, "validation", design, step))[0] for gain, step in steps.items()
    }
    best = min(losses, key=lambda gain: losses[gain])
    return {**_test(config, n, design, steps[best]), "gain": best}


def _test(config: CrowdingConfig, n: int, design: Design, step: dict[str, Any]) -> dict[str, float]:
    _, scale = _scaled(*unlearned_answers(config, n, "validation", design, step))
    logits, answers = unlearned_answers(config, n, "test", design, step)
    return {
        "cross_entropy": F.cross_entropy(scale * logits, answers).item(),
        "accuracy": (logits.argmax(-1) == answers).float().mean().item(),
        "best_scale": scale,
    }


def unlearned_answers(
    config: CrowdingConfig, n: int, split: str, design: Design, step: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return what one memory reads at the queries, [N,L], and the right labels, [N]."""

    def answer(batch: Addressed) -> Tensor:
        queries = batch.answers.shape[1]
        values = batch.tokens[:, :, None, -config.task.labels :]
        k = batch.addresses.clone()
        k[:, -queries:] = 0.0  # queries do not write
        out: Any = filter_sequence(design, batch.addresses[:, :, None], k[:, :, None], values, **step)
        return out.output[:, -queries:, 0]

    return answers_at(config, answer, n, split)


def _scaled(logits: Tensor, answers: Tensor) -> tuple[float, float]:
    """Return the least cross-entropy, and the factor of the logits that gives it."""
    losses = torch.stack([F.cross_entropy(scale * logits, answers) for scale in SCALES])
    best = int(losses.argmin())
    return losses[best].item(), SCALES[best].item()
