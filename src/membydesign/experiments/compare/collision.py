"""The controlled collision of `experiments.collision`, for any design: one schedule of writes, nothing is learned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import catalogue
from membydesign.experiments.collision.config import CollisionConfig
from membydesign.experiments.collision.trajectory import DISTRACTOR, TARGET, first_crossing, keys, schedule
from membydesign.experiments.compare.parameters import fixed
from membydesign.experiments.compare.sizes import Cannot, fit
from membydesign.filter import filter_sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design import Design


@dataclass(frozen=True, kw_only=True)
class Collision:
    """Settings of the task, which are the paper's."""

    schedule: CollisionConfig = field(default_factory=CollisionConfig)

    def measure(self, name: str, seed: int) -> dict[str, Any]:
        """Filter the schedule; return the margin of the target at its key, at the end of each phase and over time.

        Step parameters are the paper's ℓ² and r², with λ = ℓ²; no decay; a new layer's starting values for all else.
        """
        del seed
        design, config = catalogue[name], self.schedule
        return collide(design, config, stated(config))


def stated(config: CollisionConfig) -> dict[str, float]:
    """Return the variances that the task states."""
    return {
        "process_noise": config.process_noise,
        "write_noise": config.write_noise,
        "prior_variance": config.process_noise,
    }


def collide(design: Design, config: CollisionConfig, variances: Mapping[str, float]) -> dict[str, Any]:
    """Run one design over the schedule."""
    D, M = config.address_dimension, config.identities
    sizes = fit(design, D, M)
    if sizes is None:
        raise Cannot(f"expects {design.refuse_key_size(D) or design.refuse_value_size(M)}, got {D}×{M}")
    written, rows = schedule(config), keys(config, config.overlap)
    k = rows[written][None, :, None]
    v = torch.eye(M, dtype=torch.float64)[written][None, :, None]
    out = filter_sequence(design, rows[TARGET].expand_as(k), k, v, **fixed(design, variances))  # pyright: ignore[reportArgumentType]
    read = out.output[0, :, 0]
    margin = 2 * (read[:, TARGET] - read[:, DISTRACTOR]).sigmoid() - 1
    return {
        "sizes": str(sizes),
        "before_distractors": margin[config.distractor_start - 1].item(),
        "at_the_end": margin[-1].item(),
        "below_chance_from": first_crossing(config, margin),
        "margin": margin.tolist(),
    }
