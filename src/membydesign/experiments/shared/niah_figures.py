"""Draw heat maps of where one model finds more needles than another, as in the paper's long-context figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.evaluation.niah.scores import (
    DECILES,
    ENOUGH,
    difference_by_depth,
    length_and_task,
    over_tasks,
    task_of,
)
from membydesign.experiments.shared.niah_tables import in_order, short
from membydesign.experiments.shared.style import figure, house_style, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from membydesign.evaluation.niah.run import Answered
    from membydesign.evaluation.niah.scores import Cell

WORSE, EVEN, BETTER = "#cf4d8a", "#ffffff", "#4d9c4d"
"""The paper's pink and green."""

LIMIT = 15.0
"""Points at which colours are full, as in the paper."""


def plot(
    first: Sequence[Answered],
    second: Sequence[Answered],
    names: tuple[str, str],
    directory: Path,
    file: str = "niah_difference.png",
) -> dict[str, Path]:
    """Draw both heat maps, first minus second, into `directory`; return {caption: file}.

    Args:
        first: answers of a model.
        second: answers of another model to the same samples.
        names: the names of the two.
        directory: the folder of the figure.
        file: its file name.
    """
    of_both = difference_by_depth(first, second, length_and_task)
    by_length = {f"{length:,}": cells for length, cells in over_tasks(of_both).items()}
    of_tasks = {short(task): cells for task, cells in in_order(difference_by_depth(first, second, task_of)).items()}
    with house_style():
        rows = len(by_length) + len(of_tasks)
        drawing, (left, right) = figure(
            1, 2, width=12, height=1.5 + 0.38 * max(len(by_length), len(of_tasks), rows / 2)
        )
        _heat_map(left, by_length)
        left.set_title("(a)", loc="left")
        left.set_ylabel("context length")
        painted = _heat_map(right, of_tasks)
        right.set_title("(b)", loc="left")
        drawing.colorbar(painted, ax=[left, right], shrink=0.8, pad=0.01, label="points", extend="both")
        path = save(drawing, directory / file)
    caption = (
        f"RULER needles found by {names[0]} minus those found by {names[1]}, in points, by depth decile (0.0 is the "
        f"beginning of the context) and (a) context length, the mean of all tasks, (b) task, all lengths together. "
        f"Green: {names[0]} finds more. Gray border: fewer than {ENOUGH} needles."
    )
    return {caption: path}


def _heat_map(axes: Any, rows: Mapping[str, Sequence[Cell | None]]) -> Any:
    """Draw cells with their numbers; cells without needles stay empty. Return the image, for a colour bar."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    colours = LinearSegmentedColormap.from_list("difference", [WORSE, EVEN, BETTER])
    values = [[float("nan") if cell is None else cell.mean for cell in cells] for cells in rows.values()]
    painted = axes.imshow(values, cmap=colours, vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    for y, cells in enumerate(rows.values()):
        for x, cell in enumerate(cells):
            if cell is None:
                axes.text(x, y, "–", ha="center", va="center", fontsize=7, color="0.6")
                continue
            axes.text(x, y, f"{cell.mean:+.1f}", ha="center", va="center", fontsize=7, color="0.1")
            if cell.few:
                edge = Rectangle((x - 0.45, y - 0.43), 0.9, 0.86, fill=False, edgecolor="0.55", linewidth=1.6)
                axes.add_patch(edge)
    axes.set_xticks(range(10), DECILES)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("depth of the needle")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return painted
