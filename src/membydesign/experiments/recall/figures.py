"""Panels (c) and (d) of the paper's first figure, in our own drawing, and what the paper leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.recall.config import RecallRun
from membydesign.experiments.shared.addressed import UPDATES
from membydesign.experiments.shared.style import UPDATE_STYLES, band, figure, house_style, save

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.reports.record import Outcome

PANELS = {
    "distractor_writes": f"distractor writes $n_f$ ($\\rho$ = {RecallRun.test_overlap:.2f})",
    "overlap": f"overlap $\\rho$ ($n_f$ = {RecallRun.test_writes})",
}


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw all figures; return {caption: file}."""
    with house_style():
        shown = list(outcome.config.compared)
        drawn = {
            "Learned recall beyond training, pairwise margin, mean ± one deviation over seeds. Grey: what training had "
            f"on this axis; (d) has n_f = {RecallRun.test_writes}, beyond training everywhere": _panels(
                outcome, shown, "pairwise_margin", directory / "recall.png"
            ),
            "The same models: accuracy": _panels(outcome, shown, "accuracy", directory / "recall_accuracy.png"),
        }
        if outcome.config.choices:
            drawn[
                "What the paper leaves open: pairwise margins of every alternative (dashed) beside its default (solid)"
            ] = _alternatives(outcome, directory / "recall_choices.png")
        return drawn


def _line(axes: Any, points: dict[str, Any], name: str, **look: Any) -> None:
    band(axes, [float(at) for at in points], [points[at][name] for at in points], **look)


def _frame(axes: Any, panel: str, letter: str, name: str) -> None:
    axes.set_title(f"({letter})", loc="left")
    axes.set_xlabel(PANELS[panel])
    if panel == "distractor_writes":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.axvspan(RecallRun.distractor_writes[0], RecallRun.distractor_writes[-1], color="0.93", zorder=0)
    else:
        axes.axvspan(*RecallRun.overlap, color="0.93", zorder=0)
    if name == "accuracy":
        axes.axhline(1 / 16, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylim(-0.03, 1.03)
    else:
        axes.axhline(0, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylim(-1.05, 1.05)


def _panels(outcome: Outcome, updates: list[str], name: str, path: Path) -> Path:
    drawing, both = figure(1, 2, width=8.2, height=3.3)
    for axes, panel, letter in zip(both, PANELS, "cd", strict=True):
        _frame(axes, panel, letter, name)
        for update in updates:
            look = {**UPDATE_STYLES[update], "label": UPDATES[update].title, "markersize": 4}
            _line(axes, outcome.data["tests"][update][panel], name, **look)
    both[0].set_ylabel("accuracy at the queries" if name == "accuracy" else "margin $p_B - p_A$")
    drawing.legend(*both[0].get_legend_handles_labels(), loc="outside right center")
    return save(drawing, path)


def _alternatives(outcome: Outcome, path: Path) -> Path:
    """One row for each default that has alternatives."""
    groups: dict[str, list[Any]] = {}
    for choice in outcome.config.choices:
        groups.setdefault(choice.default, []).append(choice)
    drawing, grid = figure(len(groups), 2, width=9.2, height=0.6 + 1.9 * len(groups), squeeze=False)
    for row, (default, choices) in zip(grid, groups.items(), strict=True):
        for axes, panel, letter in zip(row, PANELS, "cd", strict=True):
            _frame(axes, panel, letter, "pairwise_margin")
            style = {**UPDATE_STYLES[default], "markersize": 3, "linestyle": "-"}
            lengths = {}
            for choice, marker in zip(choices, "sD^v", strict=False):
                data = outcome.data["choices"][choice.key]
                lengths.setdefault(choice.steps, data["default"])
                _line(axes, data["alternative"][panel], "pairwise_margin", color=style["color"], linestyle="--",
                      marker=marker, markersize=3, alpha=0.75, label=choice.title)  # fmt: skip
            for steps, data in lengths.items():
                label = UPDATES[default].title + (f", {steps} steps" if steps else "")
                _line(axes, data[panel], "pairwise_margin", **style, label=label)
        row[0].set_ylabel("margin")
        row[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(drawing, path)
