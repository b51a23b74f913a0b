"""Filter the schedule of writes with each update, and evaluate the closed forms at its boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from membydesign import theory
from membydesign.design import Dense, DesignModel, Diagonal, Identity, catalogue
from membydesign.filter import filter_sequence

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.belief import Belief
    from membydesign.experiments.collision.config import CollisionConfig

DISTRACTOR, TARGET = 0, 1  # the identities A and B, in the order of the seed phase


@dataclass(frozen=True)
class Trajectory:
    """One update over the whole schedule, for N overlaps (or N fixed priors) side by side.

    Attributes:
        readout_A: the read-out at k_A after every step, [N,T,M].
        readout_B: the read-out at k_B after every step, [N,T,M].
        gain: the gain of every write along its own key, [N,T]; None where no variance says it.
        variance_A: σ²(k_A) after every step, [N,T], or None.
        variance_B: σ²(k_B) after every step, [N,T], or None.
        boundary: the belief after the last target write.
    """

    readout_A: Tensor
    readout_B: Tensor
    gain: Tensor | None
    variance_A: Tensor | None
    variance_B: Tensor | None
    boundary: Belief

    def retrieval(self) -> Tensor:
        """The pairwise retrieval of B against A at k_B, [N,T]."""
        return (self.readout_B[..., TARGET] - self.readout_B[..., DISTRACTOR]).sigmoid()

    def margin(self) -> Tensor:
        """The retrieval margin Δ = 2p − 1, [N,T]."""
        return 2 * self.retrieval() - 1


def keys(config: CollisionConfig, overlap: float) -> Tensor:
    """k_A = e₁, k_B = ρe₁ + √(1−ρ²)e₂, and e₃, e₄, … for the others, [identities, D]."""
    rows = torch.eye(config.address_dimension, dtype=torch.float64)
    k_B = overlap * rows[0] + math.sqrt(1 - overlap**2) * rows[1]
    return torch.stack([rows[0], k_B, *rows[2 : config.identities]])


def schedule(config: CollisionConfig) -> Tensor:
    """Which identity is written at each step, [T]."""
    seed = torch.arange(config.identities).repeat(config.seed_repetitions)
    return torch.cat(
        [seed, torch.full((config.target_writes,), TARGET), torch.full((config.distractor_writes,), DISTRACTOR)]
    )


def trajectory(
    config: CollisionConfig,
    design: DesignModel,
    overlaps: tuple[float, ...],
    *,
    with_gain: bool = True,
    **parameters: float | Tensor,
) -> Trajectory:
    """Run one update over the schedule, for every overlap at once.

    Three heads hold the same memory and differ in what they ask: k_A, k_B, and the key that was just written, whose
    posterior variance gives the gain (σ²(k_t) = r² g_t); not so for a truncated covariance (`with_gain=False`).
    """
    written = schedule(config)
    k = torch.stack([keys(config, overlap) for overlap in overlaps])  # [N, identities, D]
    N, T = len(overlaps), len(written)
    writes = k[:, written]
    q = torch.stack([k[:, [DISTRACTOR]].expand_as(writes), k[:, [TARGET]].expand_as(writes), writes], dim=2)
    v = torch.eye(config.identities, dtype=torch.float64)[written]

    def part(start: int, end: int, initial: Belief | None) -> tuple[Tensor, Tensor | None, Belief]:
        now = slice(start, end)
        here = {n: x[:, now] if isinstance(x, torch.Tensor) and x.ndim else x for n, x in parameters.items()}
        out = filter_sequence(
            design,
            q[:, now],
            writes[:, now, None].expand(N, end - start, 3, -1),
            v[now].expand(N, end - start, config.identities)[:, :, None].expand(-1, -1, 3, -1),
            initial=initial,
            return_variance=design.has_variance,
            **here,  # pyright: ignore[reportArgumentType]
        )
        return out.output, out.variance, out.belief

    first, first_variance, boundary = part(0, config.distractor_start, None)
    second, second_variance, _ = part(config.distractor_start, T, boundary)
    readouts = torch.cat([first, second], 1)
    variance = None
    if first_variance is not None and second_variance is not None:
        variance = torch.cat([first_variance, second_variance], 1)[..., 0]
    return Trajectory(
        readout_A=readouts[:, :, 0],
        readout_B=readouts[:, :, 1],
        gain=None if variance is None or not with_gain else variance[:, :, 2] / config.write_noise,
        variance_A=variance[:, :, 0] if variance is not None and design.keeps_covariance else None,
        variance_B=variance[:, :, 1] if variance is not None and design.keeps_covariance else None,
        boundary=boundary,
    )


def updates(config: CollisionConfig, overlaps: tuple[float, ...]) -> dict[str, Trajectory]:
    """The five updates, matched in everything but what they keep of the covariance."""
    l2, r2, still = config.process_noise, config.write_noise, Identity()
    dense = catalogue["bayesian_layer"].replace(transition=still, covariance=Dense(config.prior))
    gate = torch.tensor(config.gate, dtype=torch.float64)
    unit_key = torch.ones(1, dtype=torch.float64)
    return {
        "Bayesian Layer": trajectory(config, dense, overlaps, process_noise=l2, write_noise=r2),
        "Diagonal covariance": trajectory(
            config,
            dense.replace(covariance=Diagonal(config.prior)),
            overlaps,
            with_gain=False,
            process_noise=l2,
            write_noise=r2,
        ),
        "Covariance reset": trajectory(
            config,
            catalogue["covariance_reset"].replace(transition=still),
            overlaps,
            prior_variance=l2,
            write_noise=r2,
        ),
        "DeltaNet-style": trajectory(
            config,
            catalogue["deltanet"],
            overlaps,
            prior_variance=1.0,
            write_noise=theory.write_noise_of_gate(gate, unit_key),
        ),
        "Linear Attention": trajectory(
            config, catalogue["linear_attention"], overlaps, prior_variance=l2, write_noise=r2
        ),
    }


def gain_matched(config: CollisionConfig) -> Trajectory:
    """The reset with P̄ = cI for every fixed c of the sweep, side by side."""
    c = torch.tensor(config.fixed_priors, dtype=torch.float64)
    design = catalogue["covariance_reset"].replace(transition=Identity())
    return trajectory(
        config,
        design,
        (config.overlap,) * len(c),
        prior_variance=c[:, None, None].expand(-1, config.steps, 3),
        write_noise=config.write_noise,
    )


def first_crossing(config: CollisionConfig, margin: Tensor) -> int | str:
    """The first step (counted from 1) of distractor writing at which the margin is below zero, or "never"."""
    below = (margin[config.distractor_start :] < 0).nonzero()
    return config.distractor_start + int(below[0]) + 1 if len(below) else "never"


def plateau(config: CollisionConfig, track: Trajectory, *, bayesian: bool) -> dict[str, float]:
    """The exact limit of panel (a), from the boundary state that the seed and target phases really produce."""
    k = keys(config, config.overlap)
    k_A, k_B, v_A = k[DISTRACTOR], k[TARGET], torch.eye(config.identities, dtype=torch.float64)[DISTRACTOR]
    mean = track.boundary.mean[0, 0]
    a0, b0 = mean.T @ k_A, mean.T @ k_B
    if bayesian:
        assert track.boundary.covariance is not None
        P = track.boundary.covariance[0, 0, 0]
        noises = {"process_noise": config.process_noise, "write_noise": config.write_noise}
        b_inf = theory.bayesian_plateau(P, a0, b0, v_A, k_A, k_B, **noises)
    else:
        b_inf = theory.delta_plateau(a0, b0, v_A, config.overlap)
    target, distractor = b_inf[TARGET].item(), b_inf[DISTRACTOR].item()
    return {
        "a0(A)": a0[DISTRACTOR].item(),
        "a0(B)": a0[TARGET].item(),
        "b0(A)": b0[DISTRACTOR].item(),
        "b0(B)": b0[TARGET].item(),
        "b∞(A)": distractor,
        "b∞(B)": target,
        "b∞(B) − b∞(A)": target - distractor,
        "p∞": theory.pairwise_retrieval(target, distractor),
    }


def warped_key(config: CollisionConfig, bayesian: Trajectory) -> dict[str, float]:
    """The first distractor write: its gain and angle as simulated, and as the boundary formulas give them."""
    k = keys(config, config.overlap)
    perp = (k[DISTRACTOR] - config.overlap * k[TARGET]) / math.sqrt(1 - config.overlap**2)
    assert bayesian.boundary.covariance is not None
    assert bayesian.gain is not None
    identity = torch.eye(config.address_dimension, dtype=torch.float64)
    predicted = bayesian.boundary.covariance[0, 0, 0] + config.process_noise * identity
    u = predicted @ k[DISTRACTOR]
    variance_B = theory.same_key_predicted_variance(config.process_noise, config.write_noise)
    variance_perp = (perp @ predicted @ perp).item()
    return {
        "variance_perp": variance_perp,
        "closed_form_gain": theory.boundary_gain(config.overlap, config.write_noise, variance_B, variance_perp),
        "simulated_gain": bayesian.gain[0, config.distractor_start].item(),
        "closed_form_angle_degrees": math.degrees(theory.warped_key_angle(config.overlap, variance_B, variance_perp)),
        "simulated_angle_degrees": math.degrees(math.acos((k[DISTRACTOR] @ u / u.norm()).item())),
        "limit_angle_degrees": math.degrees(theory.warped_key_angle_limit(config.overlap)),
    }
