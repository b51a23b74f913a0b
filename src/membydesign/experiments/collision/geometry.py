"""Draw covariance as write geometry: a warped key, shrinking ellipses, a rotated write; computed by the filter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from membydesign import theory
from membydesign.belief import Belief
from membydesign.design import Dense, DesignModel, Identity, ObserveMemory
from membydesign.experiments.shared.style import COLOURS, figure
from membydesign.filter import filter_step

TARGET, DISTRACTOR, WARPED = COLOURS["key_B"], COLOURS["key_A"], COLOURS["bayesian"]
PROCESS_NOISE, WRITE_NOISE, PRIOR = 0.02, 0.5, 1.0
OVERLAP = 0.8
"""Gentler than the experiment's own variances and overlap, whose ellipses and arrows lie too close to be told apart."""


def covariances(key: Tensor, writes: int) -> list[Tensor]:
    """Return P after 0, 1, …, `writes` writes of one key in the plane."""
    design = DesignModel(Identity(), ObserveMemory(), Dense(PRIOR))
    belief = Belief.prior(design, 1, 1, 2, 1, dtype=torch.float64)
    k, v = key[None, None], torch.zeros(1, 1, 1, dtype=torch.float64)
    results = [belief.dense_covariance()[0, 0, 0]]
    for _ in range(writes):
        _, belief = filter_step(design, belief, k, k, v, process_noise=PROCESS_NOISE, write_noise=WRITE_NOISE)
        results.append(belief.dense_covariance()[0, 0, 0])
    return results


def plot_geometry(data: object = None) -> Any:
    """Draw the three panels of the paper's figure on covariance as write geometry; needs no data of the run."""
    del data
    drawing, (warp, shrink, rotate) = figure(1, 3, width=11, height=3.7)
    k_B = torch.tensor([0.0, 1.0], dtype=torch.float64)
    k_A = torch.tensor([math.sqrt(1 - OVERLAP**2), OVERLAP], dtype=torch.float64)
    chain = covariances(k_B, 8)
    identity = torch.eye(2, dtype=torch.float64)

    predicted = chain[2] + PROCESS_NOISE * identity
    key = torch.tensor([math.cos(0.9), math.sin(0.9)], dtype=torch.float64)
    _ellipse(warp, predicted, facecolor=WARPED, alpha=0.10)
    _ellipse(warp, predicted, edgecolor=WARPED, lw=1.4)
    _arrow(warp, key, DISTRACTOR, r"$\mathbf{k}_t$")
    _arrow(warp, predicted @ key, WARPED, r"$\mathbf{u}_t = \bar{\mathbf{P}}_t \mathbf{k}_t$", offset=(-0.42, -0.42))
    warp.text(-0.62, 0.1, r"$\bar{\mathbf{P}}_t$", color=WARPED, ha="center", fontsize=12)
    warp.set_title("(a)  covariance warps the key", loc="left")
    _caption(warp, "resolved components shrink,\nuncertain ones take the write")

    for n, shade in ((0, 0.2), (1, 0.45), (2, 0.7), (8, 1.0)):
        _ellipse(shrink, chain[n], edgecolor=TARGET, lw=1.0 + shade, alpha=0.25 + 0.75 * shade)
        top = math.sqrt(chain[n][1, 1].item())
        shrink.text(-0.04, top - 0.1, f"n = {n}", fontsize=8, color=TARGET, ha="right")
    _arrow(shrink, k_B, TARGET, r"$\mathbf{k}_B$", offset=(0.05, -0.1))
    shrink.set_title("(b)  repeated writes resolve an address", loc="left")
    _caption(shrink, "after n writes of B,\nthe next one there has less gain")

    predicted = chain[8] + PROCESS_NOISE * identity
    u = predicted @ k_A
    angle = math.degrees(theory.warped_key_angle(OVERLAP, predicted[1, 1].item(), predicted[0, 0].item()))
    _ellipse(rotate, predicted, facecolor=TARGET, alpha=0.10)
    _ellipse(rotate, predicted, edgecolor=TARGET, lw=1.4)
    _arrow(rotate, k_B, TARGET, r"$\mathbf{k}_B$", offset=(-0.2, -0.05))
    _arrow(rotate, k_A, DISTRACTOR, r"$\mathbf{k}_A$", offset=(0.03, 0.04))
    rotate.text(0.85, 0.86, "a reset writes here", fontsize=8.5, color=DISTRACTOR)
    _arrow(rotate, u, WARPED, r"$\mathbf{u}_A$", offset=(-0.12, -0.2))
    rotate.text(0.72, -0.4, "the write lands here", fontsize=8.5, color=WARPED)
    _arc(rotate, u, k_A, angle)
    rotate.set_title("(c)  a colliding write turns away", loc="left")
    _caption(rotate, "B is resolved: a write at A\nlands on what B does not share")

    for axis in (warp, shrink, rotate):
        axis.set_aspect("equal")
        axis.set_xlim(-1.3, 1.7)
        axis.set_ylim(-1.45, 1.3)
        axis.plot([-1.25, 1.25], [0, 0], color="0.88", lw=0.8, zorder=0)
        axis.plot([0, 0], [-0.85, 1.25], color="0.88", lw=0.8, zorder=0)
        axis.set_axis_off()
    return drawing


def _caption(axis: Any, text: str) -> None:
    axis.text(0.02, 0.02, text, transform=axis.transAxes, fontsize=8.5, color="0.35", va="bottom")


def _ellipse(axis: Any, P: Tensor, **style: Any) -> None:
    """Draw the ellipse of one standard deviation, {x : xᵀP⁻¹x = 1}."""
    from matplotlib.patches import Ellipse

    variances, directions = torch.linalg.eigh(P)
    widths = (2 * variances.sqrt()).tolist()
    angle = math.degrees(math.atan2(directions[1, 0].item(), directions[0, 0].item()))
    style = {"facecolor": "none", "edgecolor": "none", **style}
    axis.add_patch(Ellipse((0, 0), widths[0], widths[1], angle=angle, **style))


def _arrow(axis: Any, tip: Tensor, colour: str, label: str, offset: tuple[float, float] = (0.04, 0.03)) -> None:
    x, y = tip.tolist()
    axis.annotate(
        "", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0}
    )
    axis.text(x + offset[0], y + offset[1], label, color=colour, fontsize=12)


def _arc(axis: Any, a: Tensor, b: Tensor, degrees: float) -> None:
    """Draw and label the angle from a to b."""
    from matplotlib.patches import Arc

    start, end = (math.degrees(math.atan2(x[1].item(), x[0].item())) for x in (a, b))
    axis.add_patch(Arc((0, 0), 0.8, 0.8, theta1=start, theta2=end, color="0.35", lw=1.2))
    middle = math.radians((start + end) / 2)
    x, y = 0.5 * math.cos(middle), 0.5 * math.sin(middle) + 0.13
    axis.text(x, y, rf"$\theta = {degrees:.0f}\degree$", fontsize=9, color="0.25")
