"""Training settings: optimiser, schedule, and intervals of log and checkpoints."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAY_CHANGE = ("log_every", "save_every")
"""Settings that a resumed run may change, because they do not change its weights."""


@dataclass(frozen=True)
class TrainSettings:
    r"""AdamW with a linear warm-up, then a cosine decay to a fraction of the peak learning rate.

    Attributes:
        steps: total optimiser steps.
        batch_size: sequences per step, over all processes.
        learning_rate: peak learning rate.
        betas: AdamW momentum coefficients.
        eps: AdamW denominator offset.
        weight_decay: AdamW weight decay.
        decayed: parameters that decay: "all", or "matrices", which excludes biases, norms and other vectors.
        clip: maximum gradient norm; None for no clipping.
        warmup: steps of linear growth from zero to the peak.
        final_fraction: final learning rate as a fraction of the peak; 1 keeps it constant after the warm-up.
        log_every: steps between log entries.
        save_every: steps between checkpoints.
    """

    steps: int
    batch_size: int
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decayed: Literal["all", "matrices"] = "matrices"
    clip: float | None = 1.0
    warmup: int = 0
    final_fraction: float = 1.0
    log_every: int = 25
    save_every: int = 250

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.decayed not in ("all", "matrices"):
            raise ValueError(f"decayed: expected 'all' or 'matrices', got {self.decayed!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: expected a number above 0, got {self.learning_rate}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: expected None or a norm above 0, got {self.clip}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup: expected from 0 to steps = {self.steps}, got {self.warmup}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction: expected from 0 to 1, got {self.final_fraction}")

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the run that was started.

        With a constant rate after the warm-up, no step depends on how many follow, and a run may become longer.
        """
        free = {*MAY_CHANGE, "steps"} if self.final_fraction == 1 else {*MAY_CHANGE}
        return {name: value for name, value in asdict(self).items() if name not in free}

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)

    def optimiser(self, model: nn.Module, multipliers: Mapping[str, float] | None = None) -> torch.optim.AdamW:
        """Create AdamW with parameter groups by weight decay and learning-rate "multiplier".

        Args:
            model: model whose parameters that require gradients are trained.
            multipliers: learning-rate multipliers by parameter name; the default is 1.
        """
        multipliers = multipliers or {}
        unknown = set(multipliers) - {name for name, p in model.named_parameters() if p.requires_grad}
        if unknown:
            raise ValueError(f"multipliers: expected names of trained parameters, got {', '.join(sorted(unknown))}")
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for decay, named in zip((self.weight_decay, 0.0), self.groups(model), strict=True):
            for name, parameter in named:
                groups.setdefault((decay, multipliers.get(name, 1.0)), []).append(parameter)
        return torch.optim.AdamW(
            [{"params": group, "weight_decay": decay, "multiplier": m} for (decay, m), group in groups.items()],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
        )

    def groups(self, model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
        """Return the parameters that decay and those that do not, with their names."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kept = set() if self.decayed == "all" else set(undecayed(model))
        return [(n, p) for n, p in named if n not in kept], [(n, p) for n, p in named if n in kept]


def undecayed(model: nn.Module) -> Iterator[str]:
    """Yield the names of biases, norm parameters, and all other vectors."""
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if norm or parameter.ndim < 2 or name.endswith("bias"):
                yield name
