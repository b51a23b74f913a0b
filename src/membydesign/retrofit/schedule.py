"""Lengths of the phases, and weights of the losses of Phase B."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of Phase B.

    Attributes:
        kl: weight λ_KL of the divergence between next-token distributions.
        boundary: weight λ_b of the mean NMSE over the replaced layers.
    """

    kl: float
    boundary: float


@dataclass(frozen=True)
class Stage:
    """A stage of training with a constant batch size.

    Attributes:
        tokens: total tokens of the stage.
        tokens_per_step: tokens per optimiser step, over all processes.
    """

    tokens: int
    tokens_per_step: int

    def __post_init__(self) -> None:
        if self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step: expected at least 1, got {self.tokens_per_step}")
        if self.tokens < 1 or self.tokens % self.tokens_per_step:
            raise ValueError(
                f"tokens: expected a multiple of tokens_per_step = {self.tokens_per_step}, got {self.tokens}"
            )

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return self.tokens // self.tokens_per_step


@dataclass(frozen=True)
class PhaseBSchedule:
    """Two stages with loss weights, and a linear ramp from the first weights to the second.

    Attributes:
        first: first stage.
        second: second stage.
        first_weights: weights of the first stage.
        second_weights: weights of the second stage after the ramp.
        ramp: length of the ramp in steps. It begins with the second stage, and its last step has the second weights;
            0 or 1 for a jump.

    Examples:
        >>> schedule = PhaseBSchedule()
        >>> schedule.steps, schedule.weights(1144), schedule.weights(1154)
        (1718, LossWeights(kl=0.8, boundary=0.2), LossWeights(kl=0.9, boundary=0.1))
    """

    first: Stage = Stage(150_077_440, 131_072)
    second: Stage = Stage(150_208_512, 262_144)
    first_weights: LossWeights = LossWeights(0.8, 0.2)
    second_weights: LossWeights = LossWeights(0.9, 0.1)
    ramp: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.ramp <= self.second.steps:
            raise ValueError(f"ramp: expected from 0 to the second stage's {self.second.steps} steps, got {self.ramp}")

    @property
    def steps(self) -> int:
        """Optimiser steps of both stages."""
        return self.first.steps + self.second.steps

    @property
    def tokens(self) -> int:
        """Tokens of both stages."""
        return self.first.tokens + self.second.tokens

    def stage(self, step: int) -> Stage:
        """Return the stage of a step, counted from 0."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step: expected from 0 to {self.steps - 1}, got {step}")
        return self.first if step < self.first.steps else self.second

    def weights(self, step: int) -> LossWeights:
        """Return the loss weights of a step, counted from 0."""
        self.stage(step)  # raises an error if the step is out of range
        done = step - self.first.steps + 1
        if done < 1:
            return self.first_weights
        if done >= self.ramp:
            return self.second_weights
        old, new, share = self.first_weights, self.second_weights, done / self.ramp
        return LossWeights(old.kl + share * (new.kl - old.kl), old.boundary + share * (new.boundary - old.boundary))


PHASE_A = Stage(100_007_936, 65_536)
"""Phase A of the paper: 1,526 steps, on the same tokens for every layer."""
