"""How a model is trained: optimiser, schedule, and how often the run is saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class TrainSettings:
    r"""AdamW with a linear warm-up, then a cosine to a fraction of the peak.

    Attributes:
        steps: of the whole run.
        batch_size: sequences of one step, over all processes together.
        learning_rate: the peak.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        decayed: which parameters decay: "all", or "matrices", without biases, norms and other vectors.
        clip: the largest norm of the gradient; None for no clipping.
        warmup: steps of linear growth from zero to the peak.
        final_fraction: where the cosine ends, as a fraction of the peak; 1 keeps the rate constant after the warm-up.
        log_every: steps between lines of the log.
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

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)

    def optimiser(self, model: nn.Module, multipliers: Mapping[str, float] | None = None) -> torch.optim.AdamW:
        """AdamW over the parameters of a model, in groups by weight decay and by "multiplier" of the learning rate.

        Args:
            model: whose parameters that need gradients are trained.
            multipliers: by names of parameters; 1 for those not named.
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
        """The parameters that decay and those that do not, by name."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kept = set() if self.decayed == "all" else set(undecayed(model))
        return [(n, p) for n, p in named if n not in kept], [(n, p) for n, p in named if n in kept]


def undecayed(model: nn.Module) -> Iterator[str]:
    """The names of biases, of parameters of norms, and of all other vectors."""
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if norm or parameter.ndim < 2 or name.endswith("bias"):
                yield name
