"""Names that the shell completes after Tab; `mbd --install-completion` sets it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer  # noqa: TC002 - typer looks at it

from membydesign.cli.requirements import benchmarks_folder, need_benchmarks
from membydesign.design import catalogue
from membydesign.evaluation.niah import TASKS
from membydesign.experiments import EXPERIMENTS, STUDIES, load
from membydesign.reports.verdict import SMOKE

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES = ("float64", "float32", "bfloat16", "float16")


def designs(incomplete: str) -> list[str]:
    """Complete designs of the catalogue."""
    return _starting(incomplete, catalogue)


def experiments(incomplete: str) -> list[str]:
    """Complete experiments of the paper."""
    return _starting(incomplete, EXPERIMENTS)


def presets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete presets of the experiment named before, or else those that every experiment has."""
    words = [ctx.params.get("experiment"), *ctx.args]  # before an option without a value, arguments are not parsed yet
    experiment = next((word for word in words if word in EXPERIMENTS), "")
    try:
        names = load(experiment).PRESETS
    except (ValueError, ModuleNotFoundError):
        names = (SMOKE, "cpu", "paper")
    return _starting(incomplete, names)


def studies(incomplete: str) -> list[str]:
    """Complete studies of `mbd compare`."""
    return _starting(incomplete, STUDIES)


def study_presets(incomplete: str) -> list[str]:
    """Complete presets, which are the same for every study."""
    return _starting(incomplete, (SMOKE, "cpu"))


def listed_designs(incomplete: str) -> list[str]:
    """Complete designs of the catalogue, several with commas."""
    return _listed(incomplete, catalogue)


def variants(incomplete: str) -> list[str]:
    """Complete variants of MQAR."""
    try:
        from membydesign.experiments.mqar.config import VARIANTS
    except ModuleNotFoundError:  # the packages that training needs are missing
        return []
    return _starting(incomplete, VARIANTS)


def sections(incomplete: str) -> list[str]:
    """Complete sections of the benchmark, several with commas; they come with a checkout."""
    if benchmarks_folder() is None:
        return []
    need_benchmarks("bench")
    from membydesign_bench.sections import SECTIONS

    return _listed(incomplete, SECTIONS)


def dtypes(incomplete: str) -> list[str]:
    """Complete types of numbers."""
    return _starting(incomplete, DTYPES)


def tasks(incomplete: str) -> list[str]:
    """Complete tasks of RULER, several with commas."""
    return _listed(incomplete, ("all", *TASKS))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _listed(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last word of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _starting(last, names)]
