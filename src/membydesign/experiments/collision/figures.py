"""The figures of the collision experiment. Nothing is computed here but what is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign import theory
from membydesign.experiments.collision.claims import OVERLAP_SWEEP
from membydesign.experiments.collision.geometry import plot_geometry
from membydesign.experiments.shared.style import COLOURS, figure, house_style, save, shades

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.reports.record import Outcome

LINES: dict[str, dict[str, Any]] = {
    "Bayesian Layer": {"color": COLOURS["bayesian"], "lw": 2.4, "zorder": 5},
    "Diagonal covariance": {"color": COLOURS["bayesian"], "lw": 1.3, "ls": (0, (4, 2))},
    "Covariance reset": {"color": COLOURS["reset"], "lw": 3.2, "alpha": 0.45},
    "DeltaNet-style": {"color": COLOURS["delta"], "lw": 1.3},
    "Linear Attention": {"color": COLOURS["additive"], "lw": 1.6},
}


CAPTIONS = {
    "collision": "Controlled collision recall. (a) Retrieval of the target at k_B: the distractor writes erase it for "
    "every update but those that propagate a covariance; triangles mark the first step below chance, ticks at the "
    "right the exact limits. (b) Why: the posterior variance along both keys, for the dense covariance (solid) and "
    "the diagonal one (dashed).",
    "write_dynamics": "Write dynamics. (a) The gain of each write, and the closed forms that predict it without a "
    "matrix: the gain that a first write of A would have had (rising), and its decay to the floor. (b) Retrieval "
    "at the end against the overlap of the two keys; circles are the paper's table.",
    "gain_matched": "Gain-matched control. No fixed prior P̄ = cI does what a propagated covariance does.",
    "geometry": "Covariance as write geometry, computed by the filter in two dimensions (p₀ = 1, r² = 0.5, ℓ² = 0.02, "
    "ρ = 0.8): ellipses of one standard deviation, (a) after two writes of B, (c) after eight.",
}


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw every figure into `directory`; returns {caption: file}."""
    draw = {"collision": _panels, "write_dynamics": _dynamics, "gain_matched": _gain_matched, "geometry": plot_geometry}
    with house_style():
        return {CAPTIONS[name]: save(f(outcome.data), directory / f"{name}.png") for name, f in draw.items()}


def _phases(axis: Any, config: Any, *, labels: bool = True) -> None:
    """Shade the three phases of the schedule and name them above the axis."""
    bounds = (0, config.target_start, config.distractor_start, config.steps)
    names = ("seed", "target writes (B)", "distractor writes (A)")
    for i, name in enumerate(names):
        if i % 2:
            axis.axvspan(bounds[i] + 0.5, bounds[i + 1] + 0.5, color="0.95", zorder=0, lw=0)
        if labels:
            middle = (bounds[i] + bounds[i + 1]) / 2 + 0.5
            axis.text(middle, 1.02, name, transform=axis.get_xaxis_transform(), ha="center", fontsize=8, color="0.35")
    axis.set_xlim(0.5, config.steps + 0.5)
    axis.set_xlabel("step t")


def _panels(data: dict[str, Any]) -> Any:
    config, main = data["config"], data["main"]
    drawing, (left, right) = figure(1, 2, width=10, height=3.6)
    t = torch.arange(1, config.steps + 1)

    _phases(left, config)
    left.axhline(theory.TARGET_WRITE_PLATEAU, color="0.5", ls=":", lw=1)
    left.text(58, theory.TARGET_WRITE_PLATEAU + 0.02, "$(1+e^{-1})^{-1} = 0.731$", fontsize=9, color="0.35")
    left.axhline(0.5, color="0.6", lw=0.8)
    left.text(config.steps - 1, 0.515, "chance", fontsize=8, color="0.45", ha="right")
    for name, run in main.items():
        left.plot(t, run.retrieval()[0], label=name, **LINES[name])
        step = data["first_sub_chance_step"][name]
        if step != "never":
            left.plot(step, 0.5, marker="v", ms=7, color=LINES[name]["color"], ls="", zorder=6)
    for name, limits in data["plateaus"].items():
        value = limits["p∞"]
        left.plot(config.steps, value, marker="_", ms=14, mew=2, color=LINES[name]["color"], clip_on=False, zorder=7)
        left.text(config.steps + 4, value, f"{value:.3f}", fontsize=8, va="center", color=LINES[name]["color"])
    left.set_ylim(0, 1.03)
    left.set_ylabel("retrieval $p$ of B against A at $\\mathbf{k}_B$")
    left.legend(loc="lower left", fontsize=8)
    left.set_title("(a)  what is retrieved", loc="left", pad=18)

    _phases(right, config)
    dense, diagonal = main["Bayesian Layer"], main["Diagonal covariance"]
    for key, colour in (("A", COLOURS["key_A"]), ("B", COLOURS["key_B"])):
        name = f"variance_{key}"
        label = rf"$\sigma_t^2(\mathbf{{k}}_{key})$"
        right.plot(t, getattr(dense, name)[0], color=colour, lw=2.2, label=label)
        right.plot(t, getattr(diagonal, name)[0], color=colour, lw=1.3, ls=(0, (4, 2)))
    slope = theory.crowding_rate(config.overlap, config.process_noise)
    late = torch.arange(config.distractor_start + 18, config.steps - 6)
    shown = dense.variance_B[0, late - 1] + 0.07
    right.plot(late, shown, color="0.3", lw=1)
    right.text(
        float(late.double().mean()) - 2,
        float(shown.mean()) + 0.05,
        rf"slope $(1-\rho^2)\ell^2 = {slope:.5f}$",
        fontsize=8,
        color="0.3",
        ha="right",
    )
    right.plot([], [], color="0.4", lw=1.3, ls=(0, (4, 2)), label="diagonal covariance")
    right.set_ylim(0, 0.75)
    right.set_ylabel(r"posterior variance $\mathbf{k}^\top \mathbf{P}_t \mathbf{k}$")
    right.legend(loc="upper center", fontsize=8, ncols=3, bbox_to_anchor=(0.55, 1.0))
    right.set_title("(b)  how sure the memory is", loc="left", pad=18)
    return drawing


def predicted_gains(config: Any, variance_perp: float) -> tuple[list[float], list[float]]:
    r"""The gains that the closed forms predict, from scalars alone.

    Args:
        config: the settings.
        variance_perp: $\bar\sigma_\perp^2$ at the first distractor write. It grew by $\ell^2$ at every target write.

    Returns:
        The gain that a first write of A would have had at each step of the target phase, and the gains of the
        distractor phase: the boundary gain, then $x' = r^2x/(r^2+x) + \ell^2$, down to the floor.
    """
    l2, r2, rho = config.process_noise, config.write_noise, config.overlap
    variance_B = theory.same_key_predicted_variance(l2, r2)
    waiting = [
        theory.boundary_gain(rho, r2, variance_B, variance_perp - l2 * (config.target_writes - n))
        for n in range(config.target_writes)
    ]
    x = rho**2 * variance_B + (1 - rho**2) * variance_perp
    decaying = []
    for _ in range(config.distractor_writes):
        decaying.append(theory.gain(x, r2))
        x = r2 * x / (r2 + x) + l2
    return waiting, decaying


def _dynamics(data: dict[str, Any]) -> Any:
    config, main = data["config"], data["main"]
    drawing, (left, right) = figure(1, 2, width=10, height=3.6)
    t = torch.arange(1, config.steps + 1)
    _phases(left, config)
    floor = theory.steady_gain(config.process_noise, config.write_noise)
    left.axhline(floor, color="0.5", ls=":", lw=1)
    left.text(14, floor - 0.07, rf"floor $g^{{ss}} = {floor:.3f}$", fontsize=8, color="0.35")
    left.plot(t, main["Bayesian Layer"].gain[0], label="Bayesian Layer", marker="o", ms=2.2, **LINES["Bayesian Layer"])
    left.plot(t, main["Covariance reset"].gain[0], label="Covariance reset", **LINES["Covariance reset"])
    waiting, decaying = predicted_gains(config, data["warped_key"]["variance_perp"])
    target = t[config.target_start : config.distractor_start]
    left.plot(target, waiting, color="0.25", lw=1.1, ls=(0, (4, 2)), label=r"closed form: $g_{A|B}$, then its decay")
    left.plot(t[config.distractor_start :], decaying, color="0.25", lw=1.1, ls=(0, (4, 2)), zorder=6)
    onset = config.distractor_start + 1
    left.annotate(
        f"onset {decaying[0]:.3f}",
        (onset, decaying[0]),
        (onset + 8, decaying[0] + 0.01),
        fontsize=8,
        color="0.25",
        arrowprops={"arrowstyle": "-", "color": "0.5", "lw": 0.8},
    )
    left.set_ylim(0.2, 1.02)
    left.set_ylabel(r"write gain $g_t = \beta_t \mathbf{k}_t^\top \mathbf{u}_t$")
    left.legend(loc="lower right", fontsize=8)
    left.set_title("(a)  gain of every write", loc="left", pad=18)

    curve = torch.tensor(data["curve"])
    for name, run in data["sweep"].items():
        right.plot(curve, run.retrieval()[:, -1], label=name, **LINES[name])
    for name in ("Bayesian Layer", "Covariance reset"):
        printed = {rho: (1 + float(row[name])) / 2 for rho, row in OVERLAP_SWEEP.items()}
        right.plot(list(printed), list(printed.values()), ls="", marker="o", ms=4, mfc="white", mec="0.2", zorder=7)
    right.plot([], [], ls="", marker="o", ms=4, mfc="white", mec="0.2", label="paper's table, $p = (1+\\Delta)/2$")
    right.axhline(0.5, color="0.6", lw=0.8)
    right.set_xlabel(r"overlap $\rho$")
    right.set_ylabel(f"retrieval $p$ at t = {config.steps}")
    right.set_ylim(0, 1.03)
    right.legend(loc="lower left", fontsize=8, bbox_to_anchor=(0.0, 0.08))
    right.set_title("(b)  retrieval against overlap", loc="left", pad=18)
    return drawing


def _gain_matched(data: dict[str, Any]) -> Any:
    config, fixed = data["config"], data["fixed"]
    drawing, axis = figure(1, 1, width=6.4, height=3.6)
    _phases(axis, config)
    t = torch.arange(1, config.steps + 1)
    axis.axhline(0, color="0.6", lw=0.8)
    axis.text(config.steps - 1, 0.012, "chance", fontsize=8, color="0.45", ha="right")
    for i, c in enumerate(config.fixed_priors):
        gate = theory.reset_gain(c, config.write_noise)
        shade = 0.38 + 0.55 * i / (len(config.fixed_priors) - 1)
        axis.plot(t, fixed.margin()[i], color=shades(shade), lw=1.3, label=f"c = {c:g}, gain {gate:.2f}")
    axis.plot(t, data["main"]["Bayesian Layer"].margin()[0], label="Bayesian Layer", **LINES["Bayesian Layer"])
    axis.set_ylabel(r"retrieval margin $\Delta$ at $\mathbf{k}_B$")
    axis.set_ylim(-0.5, 0.55)
    axis.legend(loc="center left", fontsize=8, bbox_to_anchor=(1.01, 0.5))
    axis.set_title("fixed priors against a propagated covariance", loc="left", pad=18)
    return drawing
