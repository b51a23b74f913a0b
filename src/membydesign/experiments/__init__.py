"""The paper's experiments and studies beyond it, one folder each: `config`, `run`, `claims` and `figures`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from membydesign.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from membydesign.reports.record import Outcome


class Experiment(Protocol):
    """What the `run` module of an experiment offers to the commands `mbd reproduce` and `mbd compare`."""

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

STUDIES = {
    "designs": "membydesign.experiments.compare.run",
    "length": "membydesign.experiments.length.run",
}
"""Name of a study → its module: comparisons of designs that are not claims of the paper, for `mbd compare`."""

EXACT = ("collision",)
"""The experiments without training."""


def load(name: str) -> Experiment:
    """Import an experiment or a study by name; ValueError lists the names that exist."""
    every = {**EXPERIMENTS, **STUDIES}
    if name not in every:
        raise ValueError(f"experiment: expected one of {', '.join(every)}, got {name!r}{did_you_mean(name, every)}")
    return import_module(every[name])  # pyright: ignore[reportReturnType]
