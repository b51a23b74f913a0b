"""Draw where the hybrid finds more needles or fewer, and scores and perplexity by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.retrofit.evaluation import MODELS
from membydesign.experiments.shared import niah_figures
from membydesign.experiments.shared.style import COLOURS, figure, house_style, save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from membydesign.reports.record import Outcome

LOOKS: dict[str, dict[str, Any]] = {
    "gdn_zero": {"color": COLOURS["gated_deltanet"], "marker": "s"},
    "gdn_ft": {"color": COLOURS["reset"], "marker": "D", "linestyle": "--"},
    "bl": {"color": COLOURS["bayesian"], "marker": "o", "linewidth": 2.2},
}


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw all figures; return {caption: file}."""
    drawn: dict[str, Path] = {}
    for other, (ours, theirs) in outcome.data["differences"].items():
        names = ("BL", MODELS[other])
        drawn |= niah_figures.plot(ours, theirs, names, directory, f"bl_minus_{other}.png")
    caption = (
        "Left: RULER's mean over tasks by context length. Others: perplexity of BL and GDN-FT by window length, as a "
        "change from GDN-zero's."
    )
    with house_style():
        return {caption: _by_length(outcome.data["metrics"], directory / "by_length.png"), **drawn}


def _by_length(metrics: Mapping[str, Any], path: Path) -> Path:
    texts = [*metrics["perplexity"]["bl"]]
    drawing, axes = figure(1, 1 + len(texts), width=3.4 * (1 + len(texts)) + 1, height=3.0)
    scores, *others = axes
    for model, look in LOOKS.items():
        by_length = metrics["niah"][model]
        means = [one["mean"] for one in by_length.values()]
        scores.plot([int(length) for length in by_length], means, label=MODELS[model], **look)
    scores.set_ylabel("RULER score (%)")
    for each, text in zip(others, texts, strict=True):
        zero = metrics["perplexity"]["gdn_zero"][text]
        for model in ("gdn_ft", "bl"):
            pairs = zip(metrics["perplexity"][model][text], zero, strict=True)
            change = [100 * (a["perplexity"] / b["perplexity"] - 1) for a, b in pairs]
            each.plot([one["length"] for one in zero], change, **LOOKS[model])
        each.axhline(0, **{**LOOKS["gdn_zero"], "marker": "", "linewidth": 1})
        each.set_title(text)
        each.set_ylabel("change of perplexity (%)")
    lengths = [int(length) for length in metrics["niah"]["bl"]]
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xticks(lengths, [f"{length:,}" for length in lengths])
        each.set_xlabel("length (tokens)")
    drawing.legend(*scores.get_legend_handles_labels(), loc="outside right center")
    return save(drawing, path)
