"""The paper's figure of random-key crowding, in our own drawing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from membydesign.experiments.shared.addressed import UPDATES
from membydesign.experiments.shared.style import UPDATE_STYLES, band, figure, house_style, save

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.reports.record import Outcome

PANELS = {
    "cross_entropy": "cross-entropy at the queries",
    "calibrated_cross_entropy": "after calibration",
    "accuracy": "accuracy",
}


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw all figures; return {caption: file}."""
    caption = (
        "Random-key crowding (grey: the range of training), mean ± one deviation over seeds. Middle: the same models "
        "with the best single factor of the logits for each n. Dotted: a guess."
    )
    with house_style():
        return {caption: _crowding(outcome, directory / "crowding.png")}


def _crowding(outcome: Outcome, path: Path) -> Path:
    config = outcome.config
    drawing, row = figure(1, 3, width=10.5, height=3.2)
    for axes, (name, label) in zip(row, PANELS.items(), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(config.densities.values()), [f"{x:g}" for x in config.densities.values()])
        axes.minorticks_off()
        axes.set_xlabel("keys per dimension, n/D")
        axes.set_ylabel(label)
        axes.axvspan(
            min(config.densities.values()), max(config.writes) / config.task.address_dim, color="0.93", zorder=0
        )
        guess = 1 / config.task.labels if name == "accuracy" else math.log(config.task.labels)
        axes.axhline(guess, color="0.6", linewidth=0.8, linestyle=":")
        for update in config.compared:
            points = [outcome.data[update][n][name] for n in config.densities]
            look = {**UPDATE_STYLES[update], "label": UPDATES[update].title, "markersize": 4}
            band(axes, list(config.densities.values()), points, **look)
    drawing.legend(*row[0].get_legend_handles_labels(), loc="outside right center")
    return save(drawing, path)
