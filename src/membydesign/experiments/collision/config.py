"""Settings of the controlled collision."""

from __future__ import annotations

from dataclasses import dataclass

from membydesign import theory


@dataclass(frozen=True)
class CollisionConfig:
    r"""The paper's settings (its table of hyperparameters); variances are $\ell^2$, $r^2$ and $p_0$."""

    address_dimension: int = 16
    identities: int = 6
    seed_repetitions: int = 2
    target_writes: int = 40
    distractor_writes: int = 60
    prior: float = 3.0
    process_noise: float = 0.05
    write_noise: float = 0.05
    overlap: float = 0.92
    overlap_control: float = 0.45
    overlap_sweep: tuple[float, ...] = (0.30, 0.45, 0.60, 0.75, 0.85, 0.90, 0.92, 0.95, 0.98)
    fixed_priors: tuple[float, ...] = (0.01, 0.05, 0.10, 0.50, 1.0, 3.0)

    @property
    def target_start(self) -> int:
        """Steps before the first target write."""
        return self.identities * self.seed_repetitions

    @property
    def distractor_start(self) -> int:
        """Steps before the first distractor write."""
        return self.target_start + self.target_writes

    @property
    def steps(self) -> int:
        """The length of the schedule."""
        return self.distractor_start + self.distractor_writes

    @property
    def gate(self) -> float:
        r"""The constant gain of the reset, $\gamma = \ell^2/(r^2 + \ell^2)$, which all baselines share."""
        return theory.reset_gain(self.process_noise, self.write_noise)


PRESETS = dict.fromkeys(("smoke", "cpu", "paper"), CollisionConfig())
"""The experiment is exact and takes seconds, so every preset is the paper's settings."""
