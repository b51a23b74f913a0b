"""What the shell offers when a user presses Tab: `mbd --install-completion` sets it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer  # noqa: TC002 - typer looks at it

from membydesign.cli.bench.sections import SECTIONS
from membydesign.cli.say import DTYPES
from membydesign.design import catalogue
from membydesign.evaluation.niah import TASKS
from membydesign.experiments import EXPERIMENTS, load
from membydesign.experiments.verdict import SMOKE

if TYPE_CHECKING:
    from collections.abc import Iterable


def designs(incomplete: str) -> list[str]:
    """Designs of the catalogue."""
    return _starting(incomplete, catalogue)


def experiments(incomplete: str) -> list[str]:
    """Experiments of the paper."""
    return _starting(incomplete, EXPERIMENTS)


def presets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets of the experiment that stands before, or those that all have."""
    words = [ctx.params.get("experiment"), *ctx.args]  # before an option without a value, arguments are not parsed yet
    experiment = next((word for word in words if word in EXPERIMENTS), "")
    try:
        names = load(experiment).PRESETS
    except (ValueError, ModuleNotFoundError):
        names = (SMOKE, "cpu", "paper")
    return _starting(incomplete, names)


def variants(incomplete: str) -> list[str]:
    """Variants of MQAR."""
    try:
        from membydesign.experiments.mqar_settings import VARIANTS
    except ModuleNotFoundError:  # without the packages that training needs, there is nothing to run
        return []
    return _starting(incomplete, VARIANTS)


def sections(incomplete: str) -> list[str]:
    """Sections of the benchmark, several with commas."""
    return _listed(incomplete, SECTIONS)


def dtypes(incomplete: str) -> list[str]:
    """Types of numbers."""
    return _starting(incomplete, DTYPES)


def tasks(incomplete: str) -> list[str]:
    """Tasks of RULER, several with commas."""
    return _listed(incomplete, ("all", *TASKS))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _listed(incomplete: str, names: Iterable[str]) -> list[str]:
    """The last word of a list with commas, after the words that are there."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _starting(last, names)]
