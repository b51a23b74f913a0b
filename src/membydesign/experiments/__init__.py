"""The paper's experiments, one folder each: `config`, `run`, `claims` and `figures`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from membydesign.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from membydesign.reports.record import Outcome


class Experiment(Protocol):
    """What the `run` module of an experiment offers to the command `mbd reproduce`."""

    TITLE: str
    """One line that says which claim is reproduced."""

    PRESETS: Mapping[str, object]
    """Settings (frozen dataclasses) by name: "smoke", "cpu" and "paper", which has the paper's own."""

    run: Callable[..., Outcome]
    """`run(config, context)`: do the work in the folder of the `RunContext`."""

    plot: Callable[[Outcome, Path], dict[str, Path]]
    """`plot(outcome, directory)`: draw the figures as PNG and return {caption: file}."""


EXPERIMENTS = {
    "collision": "membydesign.experiments.collision.run",
    "recall": "membydesign.experiments.recall.run",
    "crowding": "membydesign.experiments.crowding.run",
    "mqar": "membydesign.experiments.mqar.run",
    "wikitext": "membydesign.experiments.wikitext.run",
    "retrofit": "membydesign.experiments.retrofit.run",
}
"""Name of an experiment → the module that reproduces it."""

EXACT = ("collision",)
"""The experiments without training."""


def load(name: str) -> Experiment:
    """Import an experiment by name; ValueError lists the names that exist."""
    if name not in EXPERIMENTS:
        near = did_you_mean(name, EXPERIMENTS)
        raise ValueError(f"experiment: expected one of {', '.join(EXPERIMENTS)}, got {name!r}{near}")
    return import_module(EXPERIMENTS[name])  # pyright: ignore[reportReturnType]
