"""Draw perplexity on AR-hits by distance, and learning curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.experiments.shared.style import COLOURS, band, figure, house_style, save
from membydesign.experiments.wikitext.models import ARMS

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.reports.record import Outcome

DISTANCES = {"hit 1–64": "1–64", "hit 65–256": "65–256", "hit 257–1,024": "257–1,024"}
LOOKS = {
    "bayesian_layer": {"color": COLOURS["bayesian"], "marker": "o", "linewidth": 2.2},
    "gated_deltanet": {"color": COLOURS["gated_deltanet"], "marker": "s"},
    "mamba2": {"color": COLOURS["mamba2"], "marker": "^"},
}


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw all figures; return {caption: file}."""
    caption = (
        "Left: perplexity on AR-hits by the distance to the pair's last occurrence. Middle: on all and other tokens. "
        "Mean ± one deviation over seeds. Right: validation loss during training, first seed."
    )
    with house_style():
        return {caption: _perplexity(outcome, directory / "wikitext.png")}


def _perplexity(outcome: Outcome, path: Path) -> Path:
    drawing, (hits, rest, curves) = figure(1, 3, width=10.5, height=3.2)
    slices = {**DISTANCES, "overall": "all", "other": "other"}
    for arm, perplexity in outcome.data.items():
        look = {**LOOKS[arm], "label": ARMS[arm], "markersize": 5}
        for axes, names in ((hits, [*DISTANCES]), (rest, ["overall", "other"])):
            here = [(i, perplexity[name]) for i, name in enumerate(names) if perplexity[name] is not None]
            if here:
                band(axes, [i for i, _ in here], [x for _, x in here], **look)
            axes.set_xticks(range(len(names)), [slices[name] for name in names])
        curve = outcome.metrics["runs"][f"{arm}-seed0"]["validation"]["curve"]
        style = {key: value for key, value in look.items() if key != "label"}
        curves.plot([int(step) for step in curve], list(curve.values()), **style)
    hits.set_yscale("log")
    hits.set_xlabel("distance in tokens")
    hits.set_ylabel("perplexity on AR-hits")
    rest.set_ylabel("perplexity")
    rest.set_xlabel("tokens")
    curves.set_xlabel("step")
    curves.set_ylabel("validation loss (nats)")
    drawing.legend(*hits.get_legend_handles_labels(), loc="outside right center")
    return save(drawing, path)
