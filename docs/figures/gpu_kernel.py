"""Draws docs/figures/gpu_kernel.png: what one program of the forward kernel does with one chunk, and where it lives.

Run from the root of the repository: .venv/bin/python docs/figures/gpu_kernel.py
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from matplotlib.patches import FancyBboxPatch

from membydesign.experiments.shared.style import figure, house_style, save

PLACES = {"global": "#e8e8e8", "registers": "#cfe2f3", "products": "#fce5cd"}


def box(axes, x, y, width, height, text, place):
    """A box with a few lines of text."""
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", facecolor=PLACES[place], edgecolor="#555555")
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, linespacing=1.5)


def arrow(axes, start, end):
    """From one point to another."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#555555", "linewidth": 1.1})


def draw(path: Path) -> None:
    """The figure."""
    with house_style():
        canvas, axes = figure(1, 1, width=8.6, height=4.6)
        axes.set_xlim(0, 16.6)
        axes.set_ylim(0, 8.8)
        axes.axis("off")
        for x, title in ((1.5, "global memory, read"), (8.2, "one program: chunk after chunk"), (15.1, "written")):
            axes.text(x, 8.45, title, ha="center", fontsize=9, fontweight="bold")
        made = "made by torch for\nall chunks at once:\nK̃, Q̃, J, f$_C$, n$_C$,\nnoise of G and H"
        box(axes, 0.2, 5.9, 2.6, 1.9, made, "global")
        box(axes, 0.2, 3.6, 2.6, 1.2, "V, r²", "global")
        box(axes, 0.2, 1.0, 2.6, 1.2, "initial belief\nM, P", "global")
        steps = (
            (6.9, "U = K̃P        16×D×D"),
            (5.8, "G = UK̃ᵀ + noise + r²        H = Q̃Uᵀ + noise"),
            (4.7, "16 eliminations: G = LLᵀ, L⁻¹        W = tril(HL⁻ᵀ)        X = L⁻¹(f$_C$U + J)"),
            (3.6, "E = L⁻¹(V − K̃M)        O = Q̃M + WE"),
            (2.5, "M ← f$_C$M + XᵀE        P ← f$_C$Pf$_C$ + n$_C$ − XᵀX        D×D×16"),
        )
        for y, text in steps:
            box(axes, 4.1, y, 8.6, 0.75, text, "products")
        for (above, _), (below, _) in pairwise(steps):
            arrow(axes, (8.4, above - 0.05), (8.4, below + 0.82))
        kept = "P [D×D] and M [D×m] in registers, float32, from chunk to chunk"
        box(axes, 4.1, 0.7, 8.6, 1.1, f"{kept}\n(D = 256: in L2, panels of 16 rows at a time)", "registers")
        arrow(axes, (8.4, 2.45), (8.4, 1.88))
        axes.annotate("", (4.0, 7.25), (4.0, 1.3), arrowprops={"arrowstyle": "->", "color": "#1f77b4", "linewidth": 1.4,
                      "connectionstyle": "bar,fraction=-0.1"})  # fmt: skip
        axes.text(2.75, 2.85, "next\nchunk", color="#1f77b4", fontsize=8, ha="center")
        box(axes, 13.9, 5.3, 2.5, 1.3, "β, variance,\ndiagonal of G", "global")
        box(axes, 13.9, 3.3, 2.5, 1.3, "O, and E for\nthe evidence", "global")
        box(axes, 13.9, 0.9, 2.5, 1.5, "belief at each\nchunk's start,\nfor backward", "global")
        for start, end in (
            ((2.9, 7.2), (4.0, 7.25)),
            ((2.9, 4.1), (4.0, 4.0)),
            ((2.9, 1.4), (4.0, 1.2)),
            ((12.8, 5.1), (13.8, 5.8)),
            ((12.8, 4.0), (13.8, 3.95)),
            ((12.8, 1.3), (13.8, 1.55)),
        ):
            arrow(axes, start, end)
        save(canvas, path)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
