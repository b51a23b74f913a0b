"""The common look of all figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.files import replacing
from membydesign.install import install_hint

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

COLOURS = {
    "bayesian": "#1f77b4",
    "delta": "#c44e2b",
    "reset": "#e79c9c",
    "additive": "#9467bd",
    "key_A": "#d97c2b",
    "key_B": "#2a8a8a",
    "gated_deltanet": "#c44e2b",
    "mamba2": "#4d9c4d",
    "rwkv7": "#a6499a",
    "hyena": "#8c8c8c",
    "attention": "#222222",
}
"""Colours, the same in every figure; the paper's where it has one."""

UPDATE_STYLES: dict[str, dict[str, Any]] = {
    "linear_attention": {"color": COLOURS["additive"], "marker": "v", "linestyle": "-"},
    "gla_style": {"color": "#b58900", "marker": "^", "linestyle": "-"},
    "deltanet_style": {"color": COLOURS["delta"], "marker": "s", "linestyle": "-"},
    "covariance_reset": {"color": COLOURS["reset"], "marker": "D", "linestyle": "--"},
    "bayesian_layer_diagonal": {"color": "#6ba3d6", "marker": "P", "linestyle": "--"},
    "bayesian_layer": {"color": COLOURS["bayesian"], "marker": "o", "linestyle": "-", "linewidth": 2.2},
}
"""The line style of each update."""

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "mathtext.fontset": "dejavusans",
    "savefig.dpi": 180,
}


def house_style() -> AbstractContextManager[None]:
    """Return the context in which to draw and save figures; the error says what to install without matplotlib."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        hint = install_hint("command,figures")
        raise ModuleNotFoundError(f"figures need matplotlib: {hint}", name=error.name) from error
    return rc_context(_STYLE)


def figure(rows: int, columns: int, *, width: float, height: float, squeeze: bool = True) -> tuple[Any, Any]:
    """Return a figure and its axes, drawn without a display; sizes in inches; `squeeze=False` always gives a grid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing, drawing.subplots(rows, columns, squeeze=squeeze)


def band(axes: Any, x: list[float], points: list[dict[str, float]], **look: Any) -> None:
    """Draw a line of means and a band of one deviation; points have "mean" and "std"."""
    mean, std = [point["mean"] for point in points], [point["std"] for point in points]
    axes.plot(x, mean, **look)
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def save(drawing: Any, path: Path) -> Path:
    """Write a figure as PNG; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        drawing.savefig(file, format="png", metadata={"Software": "memory-by-design"})
    return path


def shades(position: float) -> Any:
    """Return a light-to-dark shade for a member of a sweep, position in [0, 1]."""
    from matplotlib import colormaps

    return colormaps["YlOrBr"](position)
