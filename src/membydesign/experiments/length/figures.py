"""The figure of the length study: gains and recall by length."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from membydesign.experiments.length.config import PLACEMENTS, QUANTILES
from membydesign.experiments.shared.style import COLOURS, figure, house_style, save, shades

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.experiments.length.config import LengthConfig
    from membydesign.reports.record import Outcome

LINES = (COLOURS["delta"], COLOURS["bayesian"], COLOURS["key_B"], COLOURS["additive"])


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw the figure; return {caption: file}."""
    caption = (
        "The distribution of the gains g of new pairs in new and in trained layers (mean over seeds), at 1 to "
        f"{outcome.config.times[-1]} times the training length (light to dark). Last row: recall by length, a line "
        "for each seed, and the distance of trained layers' gains from those at the training length."
    )
    with house_style():
        return {caption: save(_draw(outcome), directory / "length.png")}


def _draw(outcome: Outcome) -> Any:
    config, found, untrained = outcome.config, outcome.data["designs"], outcome.data["untrained"]
    columns = max(3, len(config.names))
    drawing, (new, trained, lower) = figure(3, columns, width=3.3 * columns, height=8, squeeze=False)
    for panel in (*new[len(config.names) :], *trained[len(config.names) :], *lower[3:]):
        panel.set_visible(False)
    for row, results, which in ((new, untrained, "new layers"), (trained, found, "trained layers")):
        for panel, name in zip(row, config.names, strict=False):
            _gains(panel, config, results.get(name, []))
            panel.set_title(f"{name},\n{which}", loc="left")
        row[0].set_ylabel("share of new pairs below")
    new[0].legend(title="length", fontsize=7, title_fontsize=7)
    lengths = [times * config.length for times in config.times]
    panels = dict(zip((*PLACEMENTS, "distance"), lower, strict=False))
    for (name, runs), colour in zip(found.items(), LINES, strict=False):
        for i, each in enumerate(runs):
            look = {"color": colour, "marker": "o", "ms": 3, "lw": 1.3, "label": name if i == 0 else None}
            for at in PLACEMENTS:
                panels[at].plot(lengths, [each["recall"][at][str(n)] for n in config.times], **look)
            panels["distance"].plot(lengths, [each["gains"][str(n)]["distance"] for n in config.times], **look)
    for at, panel in panels.items():
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [str(n) for n in lengths])
        panel.minorticks_off()
        panel.set(xlabel="tokens", ylim=(-0.03, 1.03))
        panel.set_title(f"recall, pairs {at}" if at in PLACEMENTS else "gains: distance from training", loc="left")
    panels["distance"].legend(fontsize=7)
    return drawing


def _gains(panel: Any, config: LengthConfig, runs: list[dict[str, Any]]) -> None:
    """Draw the distribution of gains at every length, averaged over seeds."""
    for i, times in enumerate(config.times):
        every = [each["gains"][str(times)]["quantiles"] for each in runs]
        quantiles = [mean(values) for values in zip(*every, strict=True)]
        odds = [gain / max(1e-6, 1 - gain) for gain in quantiles]
        colour = shades(0.35 + 0.65 * i / max(1, len(config.times) - 1))
        panel.plot(odds, QUANTILES[: len(odds)], color=colour, lw=2, label=f"{times}×")
    panel.set(xlabel="variance of the key over the noise, g/(1 − g)", xscale="log", ylim=(0, 1))
