"""One module per claim of the paper: its settings, its run, its figures, and the paper's numbers beside ours."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from membydesign.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from membydesign.experiments.record import Outcome


class Experiment(Protocol):
    """What every module of this folder offers to the command `mbd reproduce`."""

    TITLE: str
    """One line that says which claim is reproduced."""

    PRESETS: Mapping[str, object]
    """Settings (frozen dataclasses) by name: "smoke", "cpu" and "paper", the paper's own to the letter."""

    run: Callable[..., Outcome]
    """`run(config, workspace)`: do the work, in the folder that a `Workspace` names."""

    plot: Callable[[Outcome, Path], dict[str, Path]]
    """`plot(outcome, directory)`: draw the figures as PNG and return {caption: file}."""


EXPERIMENTS = {
    "collision": "membydesign.experiments.collision",
    "recall": "membydesign.experiments.recall",
    "crowding": "membydesign.experiments.crowding",
    "mqar": "membydesign.experiments.mqar",
    "wikitext": "membydesign.experiments.wikitext",
    "retrofit": "membydesign.experiments.retrofit",
}
"""Name of an experiment → the module that reproduces it."""

EXACT = ("collision",)
"""The experiments without training."""


def load(name: str) -> Experiment:
    """The experiment of that name; ValueError with the names that exist if there is none."""
    if name not in EXPERIMENTS:
        near = did_you_mean(name, EXPERIMENTS)
        raise ValueError(f"experiment: expected one of {', '.join(EXPERIMENTS)}, got {name!r}{near}")
    return import_module(EXPERIMENTS[name])  # pyright: ignore[reportReturnType]
