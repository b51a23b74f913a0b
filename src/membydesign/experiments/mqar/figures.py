"""Draw the figures of MQAR: one panel of the paper's figure for each variant, and learning curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.mqar.models import ARMS
from membydesign.experiments.mqar.paper import UPDATE_ARMS, UPDATE_BAYESIAN, UPDATE_OTHERS
from membydesign.experiments.mqar.tables import ENOUGH
from membydesign.experiments.shared.style import COLOURS, figure, house_style, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from membydesign.reports.record import Outcome

    Entry = dict[str, Any]

_TWINS = "Dashed: without the short convolution. The Bayesian Layer has none."
TICKS = (0.1, 1, 10, 50, 90, 99, 99.9)
"""Accuracies in per cent, on an axis that shows 99 and 99.9 apart."""
SHOWN = (0.0005, 0.9995)
"""The ends of that axis; what lies beyond is drawn there."""


def plot(outcome: Outcome, directory: Path) -> dict[str, Path]:
    """Draw the variant's figure and the curves of learning into `directory`; return {caption: file}."""
    variant = outcome.metrics["variant"]
    tested = [entry for entry in outcome.metrics["arms"] if entry["test"] is not None]
    draw: dict[str, Callable[[Sequence[Entry]], tuple[Any, str]]] = {"base": _base, "update": _update, "block": _block}
    figures = {f"mqar_{variant}": draw[variant], "learning_curves": _curves}
    made: dict[str, Path] = {}
    with house_style():
        for name, f in figures.items() if tested else ():
            drawing, caption = f(tested)
            made[caption] = save(drawing, directory / f"{name}.png")
    return made


def line(arm: str) -> dict[str, Any]:
    """Return the line style of an arm: the colour of its layer, dashed and hollow without its convolution."""
    layer = ARMS[arm].layer
    bayesian, rotating = layer.startswith("bayesian_layer"), layer == "bayesian_layer_rotating"
    twin = not ARMS[arm].convolution and arm != layer
    return {
        "color": COLOURS["bayesian" if bayesian else layer],
        "ls": (0, (4, 2)) if twin else (0, (1, 1)) if rotating else "-",
        "lw": 3.2 if bayesian else 1.4,
        "marker": "D" if rotating else "o",
        "ms": 7 if bayesian else 4,
        "mfc": "white" if twin else None,
        "zorder": 3 if bayesian else 4,  # thick and behind, so that equal lines are both seen
        "clip_on": False,
    }


def _at_widest(tested: Sequence[Entry]) -> list[Entry]:
    width = max(entry["width"] for entry in tested)
    return [entry for entry in tested if entry["width"] == width]


def _per_cent(axis: Any, what: str = "test accuracy (%)") -> None:
    axis.set_ylim(0, 100)
    axis.set_yticks(range(0, 101, 20))
    axis.set_ylabel(what)
    axis.grid(axis="y", color="0.92", lw=0.8)
    axis.set_axisbelow(True)


def _beside(axis: Any, title: str | None = None) -> None:
    """Put the legend to the right of the axes, in the order of the arms."""
    axis.legend(loc="center left", fontsize=8, bbox_to_anchor=(1.02, 0.5), handlelength=3, title=title)


def _over(axis: Any, tested: Sequence[Entry], points: Callable[[Entry], dict[int, float]], label: str) -> None:
    """Draw a line for each arm over evenly spaced categories, with a logit axis."""
    places = sorted({x for entry in tested for x in points(entry)})
    for entry in tested:
        accuracy = points(entry)
        x = [places.index(each) for each in sorted(accuracy)]
        y = [min(max(accuracy[each], SHOWN[0]), SHOWN[1]) for each in sorted(accuracy)]
        axis.plot(x, y, label=entry["title"], **line(entry["arm"]))
    axis.set_xticks(range(len(places)), [str(place) for place in places])
    axis.set_xlim(-0.25, len(places) - 0.75)
    axis.set_xlabel(label)
    axis.set_yscale("logit")
    axis.set_ylim(*SHOWN)
    axis.set_yticks([x / 100 for x in TICKS], [f"{x:g}" for x in TICKS])
    axis.minorticks_off()
    axis.set_ylabel("test accuracy (%)")
    axis.grid(axis="y", color="0.92", lw=0.8)
    axis.set_axisbelow(True)


def by_pairs(entry: Entry) -> dict[int, float]:
    """Return accuracy by number of pairs D."""
    return {int(D): measured["accuracy"] for D, measured in entry["test"]["by_pairs"].items()}


def by_rewrites(entry: Entry) -> dict[int, float]:
    """Return accuracy at the largest D by number of rewrites, where there are enough queries."""
    largest = max(entry["test"]["by_pairs"].items(), key=lambda item: int(item[0]))[1]["by_rewrites"]
    return {int(n): measured["accuracy"] for n, measured in largest.items() if measured["queries"] >= ENOUGH}


def _base(tested: Sequence[Entry]) -> tuple[Any, str]:
    widths = sorted({entry["width"] for entry in tested})
    drawing, axis = figure(1, 1, width=6.4, height=3.4)
    if len(widths) == 1:
        _over(axis, tested, by_pairs, "pairs D")
        axis.set_title(f"Base MQAR, width {widths[0]}", loc="left")
        caption = f"Base MQAR with a shared vocabulary: test accuracy by number of pairs, width {widths[0]}. {_TWINS}"
    else:
        arms = {entry["arm"]: entry for entry in tested}
        every = {arm: {e["width"]: e["test"]["accuracy"] for e in tested if e["arm"] == arm} for arm in arms}
        _over(axis, list(arms.values()), lambda entry: every[entry["arm"]], "width")
        axis.set_title("Base MQAR", loc="left")
        caption = f"Base MQAR with a shared vocabulary: test accuracy by width. {_TWINS}"
    _beside(axis)
    return drawing, caption


def _block(tested: Sequence[Entry]) -> tuple[Any, str]:
    drawing, axis = figure(1, 1, width=6.4, height=3.4)
    _over(axis, _at_widest(tested), by_pairs, "pairs D, in blocks of keys before their values")
    axis.set_title("Block-MQAR", loc="left")
    _beside(axis)
    return drawing, f"Block-MQAR: test accuracy by number of pairs. {_TWINS}"


def _update(tested: Sequence[Entry]) -> tuple[Any, str]:
    shown = _at_widest(tested)
    drawing, (left, right) = figure(1, 2, width=11, height=3.8)
    _bars(left, shown)
    left.set_title("(a)", loc="left", pad=42)
    _over(right, shown, by_rewrites, "rewrites of the key asked for")
    most = max(map(int, shown[0]["test"]["by_pairs"]))
    right.set_title(f"(b)  D = {most} pairs", loc="left", pad=42)
    _beside(right)
    caption = (
        "Update-MQAR: test accuracy (a) of keys that were written once, of keys that were rewritten, and of all, and "
        f"(b) by how often the key was rewritten, at D = {most}, where there are {ENOUGH} queries or more. "
        "Hatched and dashed: without the short convolution. The Bayesian Layer has none."
    )
    return drawing, caption


def _bars(axis: Any, shown: Sequence[Entry], width: float = 0.38) -> None:
    """Draw two bars for each arm, a stroke across them for all queries, and the paper's value if it states one."""
    for i, entry in enumerate(shown):
        look, test = line(entry["arm"]), entry["test"]
        for side, key in ((-1, "untouched"), (1, "updated")):
            if test[key] is None:
                continue
            x, value = i + side * width / 2, 100 * test[key]["accuracy"]
            hatch = "//" if look["ls"] != "-" else None
            alpha = 0.4 if key == "untouched" else 1.0
            axis.bar(x, value, width, color=look["color"], alpha=alpha, lw=0, hatch=hatch, edgecolor="white")
            stroke = 100 * test["accuracy"]
            above = stroke if 0 <= stroke - value < 5 else value  # the stroke would go through the number
            axis.text(x, above + 1.5, f"{value:.0f}", ha="center", fontsize=7, color="0.3")
        axis.hlines(100 * test["accuracy"], i - width, i + width, color="0.1", lw=1.2, zorder=4)
        if entry["arm"] in UPDATE_ARMS:
            paper = UPDATE_BAYESIAN if entry["arm"] == "bayesian_layer" else UPDATE_OTHERS
            axis.plot(i, paper, ls="", marker="D", ms=5, mfc="white", mec="0.1", zorder=5)
    axis.bar(0, 0, color="0.3", alpha=0.4, label="keys written once")
    axis.bar(0, 0, color="0.3", label="rewritten")
    axis.plot([], [], color="0.1", lw=1.2, label="all")
    axis.plot([], [], ls="", marker="D", ms=5, mfc="white", mec="0.1", label="all (paper, its own sequences)")
    names = [entry["title"].partition(", ") for entry in shown]
    axis.set_xticks(range(len(shown)), ["\n".join((*name.split(), *filter(None, [rest]))) for name, _, rest in names])
    axis.tick_params(axis="x", length=0, labelsize=7)
    _per_cent(axis)
    axis.legend(loc="lower left", fontsize=8, ncols=2, bbox_to_anchor=(-0.02, 1.03), columnspacing=1, handlelength=1.2)


def _curves(tested: Sequence[Entry]) -> tuple[Any, str]:
    drawing, axis = figure(1, 1, width=6.4, height=3.4)
    for entry in _at_widest(tested):
        steps = [0, *(point["step"] for point in entry["curve"])]
        accuracy = [0.0, *(100 * point["accuracy"] for point in entry["curve"])]
        label = f"{entry['title']}, {entry['learning_rate']:g}"
        axis.plot(steps, accuracy, label=label, **{**line(entry["arm"]), "ms": 3})
    axis.set_xlim(left=0)
    axis.set_xlabel("step")
    _per_cent(axis, "validation accuracy (%)")
    axis.set_title("Learning", loc="left")
    _beside(axis, "model, learning rate")
    return drawing, f"Validation accuracy during training, each model with the learning rate that was chosen. {_TWINS}"
