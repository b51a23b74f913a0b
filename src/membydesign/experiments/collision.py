r"""The controlled-collision experiment: two overlapping keys, no learning, every number exact.

Six identities are seeded; then B is written 40 times (the target), then A 60 times (the distractor, with
$k_A^\top k_B = \rho = 0.92$), and $k_B$ is queried after every step. Updates differ in nothing but what they keep of
the covariance. The paper: §4.1 and its appendix on controlled collision recall.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from membydesign import theory
from membydesign.design import Dense, DesignModel, Diagonal, Identity, catalogue
from membydesign.experiments import collision_paper as paper
from membydesign.experiments.collision_figures import plot
from membydesign.experiments.record import Comparison, Outcome, printed
from membydesign.experiments.workspace import Workspace
from membydesign.ops import filter_sequence

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.belief import Belief

__all__ = ["PRESETS", "TITLE", "CollisionConfig", "plot", "run"]

TITLE = "Controlled collision recall: a propagated covariance protects what was written"
DISTRACTOR, TARGET = 0, 1  # the identities A and B, in the order of the seed phase


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
    config: CollisionConfig, design: DesignModel, overlaps: tuple[float, ...], **parameters: float | Tensor
) -> Trajectory:
    """Run one update over the schedule, for every overlap at once.

    Three heads hold the same memory and differ in what they ask: k_A, k_B, and the key that was just written, whose
    posterior variance gives the gain (σ²(k_t) = r² g_t).
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
    truncated = isinstance(design.covariance, Diagonal)  # the kept diagonal is not the posterior along k_t
    return Trajectory(
        readout_A=readouts[:, :, 0],
        readout_B=readouts[:, :, 1],
        gain=None if variance is None or truncated else variance[:, :, 2] / config.write_noise,
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
            config, dense.replace(covariance=Diagonal(config.prior)), overlaps, process_noise=l2, write_noise=r2
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


def run(config: CollisionConfig, workspace: Workspace | None = None) -> Outcome:
    """Run the whole experiment and compare it with the paper."""
    progress = (workspace or Workspace()).stage
    progress("five updates over the schedule")
    main = updates(config, (config.overlap,))
    progress("overlap sweep")
    curve = tuple(sorted({*config.overlap_sweep, *(i / 100 for i in range(30, 100))}))
    sweep = updates(config, curve)
    progress("gain-matched sweep")
    fixed = gain_matched(config)
    progress("closed forms")
    plateaus = {
        "Bayesian Layer": plateau(config, main["Bayesian Layer"], bayesian=True),
        "DeltaNet-style": plateau(config, main["DeltaNet-style"], bayesian=False),
    }
    rows = {rho: i for i, rho in enumerate(curve)}
    comparisons = [
        *_key_values(config, main),
        *_closed_forms(config, main["Bayesian Layer"]),
        *_plateaus(plateaus),
        *_gain_matched(config, fixed, main["Bayesian Layer"]),
        *_overlap_sweep(config, sweep, rows),
    ]
    reset, delta = main["Covariance reset"].retrieval(), main["DeltaNet-style"].retrieval()
    metrics = {
        "retrieval": {name: track.retrieval()[0].tolist() for name, track in main.items()},
        "first_sub_chance_step": {name: first_crossing(config, track.margin()[0]) for name, track in main.items()},
        "largest_difference_of_reset_and_deltanet": (reset - delta).abs().max().item(),
        "margin_at_control_overlap": {
            name: track.margin()[rows[config.overlap_control], -1].item() for name, track in sweep.items()
        },
        "plateaus": plateaus,
        "warped_key": _warped_key(config, main["Bayesian Layer"]),
    }
    data = {"main": main, "sweep": sweep, "curve": curve, "fixed": fixed}
    return Outcome(config, comparisons, metrics, paper.NOTES, {**data, **metrics, "config": config})


def _key_values(config: CollisionConfig, main: dict[str, Trajectory]) -> list[Comparison]:
    claim = "Key values of the trajectory"
    at = {"t=1": 0, "t=53": config.distractor_start, "t=112": config.steps - 1, "t=52": config.distractor_start - 1}
    found = []
    for name, gains, margins in (
        ("Bayesian Layer", paper.GAINS_BAYESIAN, paper.MARGINS_BAYESIAN),
        ("Covariance reset", paper.GAINS_RESET, paper.MARGINS_RESET),
    ):
        gain, margin = main[name].gain, main[name].margin()
        assert gain is not None
        found += [printed(claim, f"{name}: gain of A at {t}", x, gain[0, at[t]].item()) for t, x in gains.items()]
        found += [printed(claim, f"{name}: margin at {t}", x, margin[0, at[t]].item()) for t, x in margins.items()]
    return found


def _closed_forms(config: CollisionConfig, bayesian: Trajectory) -> list[Comparison]:
    claim = "Closed forms"
    assert bayesian.variance_B is not None
    l2, r2 = config.process_noise, config.write_noise
    slope = (bayesian.variance_B[0, -1] - bayesian.variance_B[0, -2]).item()
    key = _warped_key(config, bayesian)
    target = bayesian.retrieval()[0, config.distractor_start - 1].item()
    return [
        printed(claim, "steady gain g_A of repeated writes", "0.62", theory.steady_gain(l2, r2)),
        printed(claim, "boundary gain g_A|B after 40 target writes", "0.91", key["closed_form_gain"]),
        printed(claim, "target-write plateau: retrieval at t=52", "0.731", target),
        Comparison(claim, "slope of σ²(k_B) = (1 − ρ²)ℓ²", theory.crowding_rate(config.overlap, l2), slope, 1e-9),
    ]


def _warped_key(config: CollisionConfig, bayesian: Trajectory) -> dict[str, float]:
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


def _plateaus(plateaus: dict[str, dict[str, float]]) -> list[Comparison]:
    claim = "Exact plateaus of panel (a), from the boundary state"
    return [
        printed(claim, f"{name}: {quantity}", value, plateaus[name][quantity])
        for name, row in paper.PLATEAUS.items()
        for quantity, value in row.items()
    ]


def _gain_matched(config: CollisionConfig, fixed: Trajectory, bayesian: Trajectory) -> list[Comparison]:
    claim = "Gain-matched sweep: no fixed prior c recovers the Bayesian Layer"
    found = []
    assert fixed.gain is not None
    for i, (c, (gate, margin, step)) in enumerate(paper.GAIN_MATCHED.items()):
        assert config.fixed_priors[i] == c
        twice = (f"c = {c}", margin) in paper.ROUNDED_TWICE
        found += [
            printed(claim, f"c = {c}: gain", gate, fixed.gain[i, -1].item()),
            printed(claim, f"c = {c}: margin at t=112", margin, fixed.margin()[i, -1].item(), rounded_twice=twice),
            Comparison(claim, f"c = {c}: zero-crossing step", step, first_crossing(config, fixed.margin()[i]), 0),
        ]
    margin, step = paper.GAIN_MATCHED_BAYESIAN
    return [
        *found,
        printed(claim, "Bayesian Layer: margin at t=112", margin, bayesian.margin()[0, -1].item()),
        Comparison(claim, "Bayesian Layer: zero-crossing step", step, first_crossing(config, bayesian.margin()[0]), 0),
    ]


def _overlap_sweep(config: CollisionConfig, sweep: dict[str, Trajectory], rows: dict[float, int]) -> list[Comparison]:
    claim = "Overlap sweep: margin at t=112"
    found = []
    for rho in config.overlap_sweep:
        for name, value in paper.OVERLAP_SWEEP[rho].items():
            ours = sweep[name].margin()[rows[rho], -1].item()
            twice = (f"ρ = {rho:.2f}", value) in paper.ROUNDED_TWICE
            found.append(printed(claim, f"ρ = {rho:.2f}: {name}", value, ours, rounded_twice=twice))
    return found
