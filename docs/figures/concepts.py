"""Draw the figures of docs/concepts: the recurrence, the assumptions, stationary drift and the chunk form.

Run from the root of the repository: .venv/bin/python docs/figures/concepts.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.patches import Ellipse, FancyBboxPatch, Rectangle

import membydesign as mbd
from membydesign.experiments.shared.style import COLOURS, figure, house_style, save

FOLDER = Path(__file__).parent
BLUE, RED, GREY = COLOURS["bayesian"], COLOURS["delta"], "#777777"


def ellipse(axes, covariance, **look):
    """One standard deviation of a covariance."""
    values, vectors = torch.linalg.eigh(covariance)
    angle = math.degrees(math.atan2(float(vectors[1, 1]), float(vectors[0, 1])))
    width, height = 2 * values.flip(0).clamp(min=0).sqrt()
    axes.add_patch(Ellipse((0, 0), float(width), float(height), angle=angle, **look))


def arrow(axes, x, y, colour, label, at):
    """From the origin, with a label."""
    axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2})
    axes.text(*at, label, color=colour, fontsize=10)


def recurrence():
    """Three panels: a covariance that was shaped by one write drifts, takes in another, and is read."""
    unit = torch.nn.functional.normalize
    first, second = unit(torch.tensor([[1.0, 0.25], [0.75, 0.7]]), dim=-1)
    design, step = mbd.catalogue["bayesian_layer"], {"log_decay": math.log(0.9), "write_noise": 0.1}
    k, v = first.view(1, 1, 1, 2), torch.ones(1, 1, 1, 1)
    before = mbd.filter_sequence(design, k, k, v, process_noise=0.0, **step).belief
    predicted = design.predict(
        before,
        mbd.Step(
            {
                "log_decay": torch.full((1, 1), math.log(0.9)),
                "process_noise": torch.full((1, 1), 0.15),
                "write_noise": torch.full((1, 1), 0.1),
            },
            second.view(1, 1, 2),
        ),
    )
    written = mbd.filter_sequence(
        design, second.view(1, 1, 1, 2), second.view(1, 1, 1, 2), v, initial=before, process_noise=0.15, **step
    ).belief
    P, predicted_P, written_P = (x.covariance[0, 0, 0] for x in (before, predicted, written))
    warped = predicted_P @ second
    with house_style():
        drawing, panels = figure(1, 3, width=8.6, height=3.2)
        titles = ("predict: certainty fades", "write: towards what is unknown", "read: and how sure it is")
        for axes, title in zip(panels, titles, strict=True):
            axes.set(xlim=(-1.2, 1.2), ylim=(-1.25, 1.45), xticks=[], yticks=[], aspect="equal")
            axes.text(0, 1.3, title, ha="center", fontsize=10, fontweight="bold")
            axes.spines[:].set_visible(False)
        ellipse(panels[0], P, fill=False, edgecolor=GREY, linestyle="--", linewidth=1.5)
        ellipse(panels[0], predicted_P, facecolor=BLUE, alpha=0.25, edgecolor=BLUE)
        panels[0].text(0, -1.12, "dashed $P_{t-1}$, filled $\\bar P_t$", ha="center", fontsize=9)
        ellipse(panels[1], predicted_P, facecolor=BLUE, alpha=0.15, edgecolor=BLUE)
        arrow(panels[1], *second.tolist(), GREY, "key $k_t$", (0.78, 0.72))
        arrow(panels[1], *(unit(warped, dim=0)).tolist(), RED, "warped key $\\bar P_t k_t$", (-0.55, 1.05))
        panels[1].text(0, -1.12, "the write lands along $\\bar P_t k_t$", ha="center", fontsize=9)
        ellipse(panels[2], predicted_P, fill=False, edgecolor=GREY, linestyle="--", linewidth=1.5)
        ellipse(panels[2], written_P, facecolor=BLUE, alpha=0.25, edgecolor=BLUE)
        panels[2].text(
            0, -1.12, "dashed $\\bar P_t$, filled $P_t$; variance $q^{\\!\\top}\\!P_t q$", ha="center", fontsize=9
        )
        save(drawing, FOLDER / "recurrence.png")


def assumptions():
    """Three columns of answers, and three architectures as paths through them."""
    columns = {
        "how memory drifts": ["Identity", "ScalarDecay", "DiagonalDecay", "DampedRotation"],
        "what a write observes": ["ObserveMemory", "LatentInput", "StudentTWrite"],
        "what is kept of P": ["Dense", "LowRank, Block", "Diagonal", "Reset", "MeanOnly"],
    }
    paths = {
        "Bayesian Layer": ((2, 0, 0), BLUE, 0.1),
        "KDA": ((2, 0, 3), RED, -0.1),
        "GLA": ((2, 1, 4), COLOURS["additive"], -0.25),
    }
    with house_style():
        drawing, axes = figure(1, 1, width=8.6, height=3.9)
        axes.set(xlim=(-0.2, 10.4), ylim=(-0.75, 6.1))
        axes.axis("off")
        places = {}
        for column, (title, names) in enumerate(columns.items()):
            axes.text(1.2 + 3.1 * column, 5.75, title, ha="center", fontsize=10, fontweight="bold")
            for row, name in enumerate(names):
                x, y = 3.1 * column, 4.7 - row * 4.7 / max(len(names) - 1, 1)
                places[column, row] = x, y
                axes.add_patch(
                    FancyBboxPatch(
                        (x, y - 0.28),
                        2.4,
                        0.56,
                        boxstyle="round,pad=0.06",
                        facecolor="#f2f2f2",
                        edgecolor="#999999",
                        zorder=3,
                    )
                )
                axes.text(x + 1.2, y, name, ha="center", va="center", fontsize=9, zorder=4)
        for name, (rows, colour, shift) in paths.items():
            points = [places[column, row] for column, row in enumerate(rows)]
            for (x0, y0), (x1, y1) in pairwise(points):
                axes.plot(
                    [x0 + 2.46, x1 - 0.06],
                    [y0 + shift, y1 + shift],
                    color=colour,
                    linewidth=2.4,
                    zorder=2,
                    solid_capstyle="round",
                )
            x, y = points[-1]
            axes.text(x + 2.6, y, name, color=colour, fontsize=10, fontweight="bold", va="center")
        save(drawing, FOLDER / "assumptions.png")


def stationary():
    """Variance along a direction that nobody writes, by the filter itself."""
    T = 2000
    k = torch.zeros(1, T, 1, 2)
    q = torch.zeros(1, T, 1, 2)
    q[..., 0] = 1
    v = torch.zeros(1, T, 1, 1)
    with house_style():
        drawing, axes = figure(1, 1, width=6.4, height=2.9)
        for alpha, style in ((0.99, "-"), (0.998, "--")):
            step = {"log_decay": math.log(alpha), "write_noise": 0.5}
            free = mbd.filter_sequence(
                mbd.catalogue["bayesian_layer"], q, k, v, process_noise=0.05, return_variance=True, **step
            )
            kept = mbd.filter_sequence(
                mbd.catalogue["stationary_bayesian_layer"],
                q,
                k,
                v,
                stationary_variance=1.0,
                return_variance=True,
                **step,
            )
            for out, colour, name in ((free, RED, "free noise, ℓ² = 0.05"), (kept, BLUE, "stationary, σ² = 1")):
                assert out.variance is not None
                axes.plot(
                    range(1, T + 1),
                    out.variance[0, :, 0, 0],
                    color=colour,
                    linestyle=style,
                    label=f"{name}, α = {alpha}",
                )
        axes.axvspan(0, 128, color="#dddddd", zorder=0)
        axes.text(140, 1.4, "training\nlength 128", fontsize=8, color=GREY, va="bottom")
        axes.set(xlabel="tokens", ylabel="variance of an unwritten direction", yscale="log", xlim=(0, T))
        axes.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.66))
        save(drawing, FOLDER / "stationary.png")


def chunk():
    """Left the loop, right one chunk of joint conditioning."""
    with house_style():
        drawing, axes = figure(1, 1, width=8.6, height=3.0)
        axes.set(xlim=(0, 17.4), ylim=(0, 5.6))
        axes.axis("off")
        axes.text(3.6, 5.25, "token by token", ha="center", fontsize=10, fontweight="bold")
        axes.text(12.9, 5.25, "a chunk at once", ha="center", fontsize=10, fontweight="bold")
        for t in range(4):
            x = 0.1 + 1.85 * t
            axes.add_patch(
                FancyBboxPatch((x, 2.3), 1.2, 1.0, boxstyle="round,pad=0.06", facecolor="#cfe2f3", edgecolor="#555555")
            )
            axes.text(x + 0.6, 2.8, f"step {t + 1}", ha="center", va="center", fontsize=9)
            axes.annotate("", (x + 1.82, 2.8), (x + 1.27, 2.8), arrowprops={"arrowstyle": "->", "color": "#555555"})
            axes.annotate("", (x + 0.6, 2.2), (x + 0.6, 1.35), arrowprops={"arrowstyle": "->", "color": "#555555"})
            axes.text(x + 0.6, 0.95, f"$k_{t + 1}, v_{t + 1}$", ha="center", fontsize=9)
        axes.text(3.6, 4.1, "each waits for the one before", ha="center", fontsize=9, color=GREY)
        size, left, top = 0.62, 11.3, 4.2
        for row in range(4):
            for column in range(4):
                face = "#fce5cd" if column < row else "#f6b26b" if column == row else "white"
                axes.add_patch(
                    Rectangle(
                        (left + column * size, top - (row + 1) * size),
                        size,
                        size,
                        facecolor=face,
                        edgecolor="#999999",
                        linewidth=0.8,
                    )
                )
        axes.text(
            left + 2 * size,
            1.25,
            "$G = LL^{\\top}$: how the chunk's\nobservations vary together",
            ha="center",
            va="top",
            fontsize=9,
        )
        axes.add_patch(
            FancyBboxPatch((8.6, 2.4), 1.5, 1.0, boxstyle="round,pad=0.06", facecolor="#e8e8e8", edgecolor="#555555")
        )
        axes.text(9.35, 2.9, "$M_0, P_0$", ha="center", va="center", fontsize=10)
        axes.annotate("", (11.2, 2.9), (10.2, 2.9), arrowprops={"arrowstyle": "->", "color": "#555555"})
        axes.annotate("", (15.1, 2.9), (13.9, 2.9), arrowprops={"arrowstyle": "->", "color": "#555555"})
        axes.add_patch(
            FancyBboxPatch((15.2, 2.4), 1.6, 1.0, boxstyle="round,pad=0.06", facecolor="#e8e8e8", edgecolor="#555555")
        )
        axes.text(16.0, 2.9, "$M_4, P_4$", ha="center", va="center", fontsize=10)
        save(drawing, FOLDER / "chunk.png")


if __name__ == "__main__":
    recurrence()
    assumptions()
    stationary()
    chunk()
