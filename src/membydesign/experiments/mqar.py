"""The MQAR experiment: recall with a shared vocabulary, of rewritten keys, and of keys that stand apart from values.

Every model is trained with the learning rates of the variant's grid; the one with the best validation accuracy counts.
The paper: §4.2 and its appendix on the Zoology MQAR benchmark.
"""

from __future__ import annotations

from typing import Any

from membydesign.experiments import mqar_paper as paper
from membydesign.experiments.mqar_figures import plot
from membydesign.experiments.mqar_results import by_learning_rate, choose, compare, converged, entries, mean
from membydesign.experiments.mqar_runs import work
from membydesign.experiments.mqar_settings import PRESETS, VARIANTS, MQARConfig, Task
from membydesign.experiments.mqar_tables import notes, tables
from membydesign.experiments.record import Outcome
from membydesign.experiments.workspace import Workspace
from membydesign.training import Run

__all__ = ["PRESETS", "TITLE", "VARIANTS", "MQARConfig", "Task", "plot", "run"]

TITLE = "MQAR with a shared vocabulary: recall, rewrites and blocks"

LEARNT = 0.5
"""Validation accuracy above which a model has learnt to recall; guessing among values of a sequence is far below."""


def run(config: MQARConfig, workspace: Workspace | None = None) -> Outcome:
    """Train and test every arm of a variant; what was done before in the workspace is not done again."""
    workspace = workspace or Workspace()
    workspace.stage(f"training, {config.variant}")
    metrics = _in_rounds(config, workspace)
    workspace.stage("comparing")
    found = entries(list(metrics.values()))
    comparisons, missing = compare(config, found)
    return Outcome(
        config,
        comparisons,
        {"variant": config.variant, "share_of_paper": config.share_of_paper, "arms": found, "runs": metrics},
        [*notes(config, found), *missing],
        tables=tables(config, found),
    )


def _in_rounds(config: MQARConfig, workspace: Workspace) -> dict[str, dict[str, Any]]:
    """The metrics of all runs, by name: of the whole grid at once, or of one learning rate after another.

    In the second case a model that has learnt to recall is left out once its best learning rate is not the last one
    tried, or is near-perfect; one that has not is tried with all.
    """
    task, metrics = config.task, {}
    models = every = [(arm, width) for width in task.widths for arm in task.arms]
    rates = sorted(task.learning_rates, reverse=True)
    for tried in [rates] if config.whole_grid else [[rate] for rate in rates]:
        runs = [run for model in models for rate in tried for run in config.runs(*model, rate)]
        metrics |= workspace.sweep([Run(run.name, run, work) for run in runs])
        done = by_learning_rate(list(metrics.values()))
        models = [model for model in models if _unsettled(done[model], tried[-1])]
    order = [run.name for model in every for rate in task.learning_rates for run in config.runs(*model, rate)]
    return {name: metrics[name] for name in order if name in metrics}


def _unsettled(rates: dict[float, list[dict[str, Any]]], last: float) -> bool:
    """Whether a learning rate below the last one tried may be better than all.

    Below `LEARNT` nothing tells learning rates apart.
    """
    best = choose(rates)
    if best is None:
        return True
    reached = mean([run["validation"]["accuracy"] for run in converged(rates[best])])
    return reached < LEARNT or (best == last and reached < paper.NEAR_PERFECT / 100)
