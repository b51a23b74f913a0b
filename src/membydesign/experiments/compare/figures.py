"""The figures of the comparison: one page for all tasks, and one for calibration."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from membydesign.experiments.compare.calibration import NOISES
from membydesign.experiments.compare.tables import crowding_tests, reason, recall_tests, values
from membydesign.experiments.shared.style import COLOURS, figure, house_style, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from membydesign.reports.record import Outcome

SHADES = ("#9ec5e5", "#4f97cf", "#1f5f99", "#0b2f52")
MARKERS = ("o", "s", "D", "^")
_NOISE_COLOURS = ("0.5", SHADES[1], SHADES[3], COLOURS["key_B"], COLOURS["delta"])
NOISE_LOOKS = {
    noise: (colour, marker) for noise, colour, marker in zip(NOISES, _NOISE_COLOURS, (*MARKERS, "v"), strict=True)
}
DARK = 0.2
"""Cells in the darkest fifth of a scale have white numbers."""
WRONG = 0.3
"""A coverage this far from the nominal one has the strongest colour."""


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw both figures; return {caption: file}."""
    with house_style():
        return {
            "Every design on every task. A cross: it cannot do it or was not run; see the last table.": save(
                _page(outcome), directory / "compare.png"
            ),
            "Calibration of the designs that state a predictive density: coverage of 90 % intervals (blue: too wide, "
            "red: too narrow), log score per value, and how well the variance of a read finds keys that were never "
            "written.": save(_calibration(outcome), directory / "calibration.png"),
        }


def _page(outcome: Outcome) -> Any:
    config, designs = outcome.config, outcome.data
    names = list(designs)
    drawing, panels = figure(1, 4, width=11, height=1.6 + 0.24 * max(len(names), 8))
    recall = {test: (test, "accuracy") for test in recall_tests(config)}
    crowding = {test: (test, "accuracy") for test in crowding_tests(config)}
    coverage = {noise: (noise, "coverage 90") for noise in NOISES}
    tests = {
        "collision": ({"after all distractors": ("at_the_end",), "before": ("before_distractors",)}, "margin"),
        "recall": (recall, "accuracy"),
        "crowding": (crowding, "accuracy"),
        "calibration": (coverage, "share inside 90 % intervals"),
    }
    titles = ("Collision", "Learned recall", "Random keys", "Calibration")
    for panel, title, (task, (paths, label)) in zip(panels, titles, tests.items(), strict=True):
        usual = zip(paths, reversed(SHADES), MARKERS, strict=False)
        looks = NOISE_LOOKS if task == "calibration" else {test: (colour, marker) for test, colour, marker in usual}
        for i, name in enumerate(names):
            panel.axhline(i, color="0.93", lw=0.8, zorder=0)
            if reason(designs[name][task]):
                panel.plot(0.5, i, marker="x", color="0.6", ms=4, transform=panel.get_yaxis_transform())
        for test, path in paths.items():
            colour, marker = looks[test]
            points = [(mean(v), i) for i, name in enumerate(names) if (v := values(designs[name][task], *path))]
            x, y = [p[0] for p in points], [p[1] for p in points]
            panel.plot(x, y, marker, color=colour, ms=4.5, label=test, alpha=0.9)
        panel.set(xlabel=label, ylim=(len(names) - 0.5, -0.5))
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names), fontsize=8)
        panel.tick_params("y", length=0)
        panel.set_title(title, loc="left")
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0 + 0.9 / max(len(names), 8)), fontsize=7, ncols=2)
    panels[0].axvline(0, color="0.5", lw=0.8, ls=":")
    panels[3].axvline(0.9, color="0.3", lw=0.8, ls=":")
    panels[0].set_xlim(-1.05, 1.05)
    for panel in panels[1:3]:
        panel.set_xlim(-0.03, 1.03)
    return drawing


def _calibration(outcome: Outcome) -> Any:
    designs = outcome.data
    names = [name for name, of in designs.items() if not reason(of["calibration"])]
    drawing, panels = figure(1, 3, width=10, height=1.4 + 0.25 * max(len(names), 4))
    panels[0].get_gridspec().set_width_ratios([5, 5, 1])
    coverage = _numbers(designs, names, "coverage 90")
    scores = _numbers(designs, names, "log score")
    found = [[mean(values(designs[name]["calibration"], "as told", "never written"))] for name in names]
    _cells(panels[0], coverage, names, NOISES, "RdBu", (0.9 - WRONG, 0.9 + WRONG), "{:.2f}")
    _cells(panels[1], scores, [""] * len(names), NOISES, "Greys_r", (-4.0, 2.0), "{:.2f}")
    _cells(panels[2], found, [""] * len(names), ("found",), "Greys", (0.5, 2.0), "{:.2f}")
    panels[0].set_title("(a) share inside 90 % intervals", loc="left")
    panels[1].set_title("(b) log score per value", loc="left")
    panels[2].set_title("(c)", loc="left")
    return drawing


def _numbers(designs: Any, names: Sequence[str], number: str) -> list[list[float]]:
    return [[mean(values(designs[name]["calibration"], noise, number)) for noise in NOISES] for name in names]


def _cells(
    panel: Any, numbers: Any, rows: Sequence[str], columns: Any, colours: str, limits: tuple[float, float], text: str
) -> None:
    """Draw a table of coloured cells with their numbers."""
    panel.set_xticks(range(len(columns)), columns, rotation=25, ha="right", fontsize=8)
    panel.set_yticks(range(len(rows)), rows, fontsize=8)
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)
    if not numbers:
        return
    panel.imshow(numbers, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", alpha=0.8)
    for i, row in enumerate(numbers):
        for j, value in enumerate(row):
            from_light = (value - limits[0]) / (limits[1] - limits[0])
            dark = from_light < DARK if colours != "Greys" else from_light > 1 - DARK
            ink = "white" if dark else "black"
            panel.text(j, i, text.format(value), ha="center", va="center", fontsize=7.5, color=ink)
