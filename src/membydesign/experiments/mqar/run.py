"""Run MQAR: recall with a shared vocabulary, of rewritten keys, and of keys that stand apart from their values.

Every model is trained with a grid of learning rates; the one with the best validation accuracy is tested.
The paper: §4.2 and its appendix on the Zoology MQAR benchmark.
"""

from __future__ import annotations

from typing import Any

from membydesign.experiments.mqar import paper
from membydesign.experiments.mqar.claims import compare
from membydesign.experiments.mqar.config import PRESETS, VARIANTS, MQARConfig, Task
from membydesign.experiments.mqar.figures import plot
from membydesign.experiments.mqar.results import by_learning_rate, choose, converged, entries, mean
from membydesign.experiments.mqar.tables import notes, tables
from membydesign.experiments.mqar.training import work
from membydesign.experiments.shared.run_context import RunContext
from membydesign.reports.record import Outcome
from membydesign.training import Run

__all__ = ["PRESETS", "TITLE", "VARIANTS", "MQARConfig", "Task", "plot", "run"]

TITLE = "MQAR with a shared vocabulary: recall, rewrites and blocks"

LEARNT = 0.5
"""Validation accuracy above which a model has learnt to recall; guessing among values of a sequence is far below."""


def run(config: MQARConfig, context: RunContext | None = None) -> Outcome:
    """Train and test every arm of a variant; finished runs are not repeated."""
    context = context or RunContext()
    context.stage(f"training, {config.variant}")
    metrics = _in_rounds(config, context)
    context.stage("comparing")
    arms = entries(list(metrics.values()))
    comparisons, missing = compare(config, arms)
    return Outcome(
        config,
        comparisons,
        {"variant": config.variant, "share_of_paper": config.share_of_paper, "arms": arms, "runs": metrics},
        [*notes(config, arms), *missing],
        tables=tables(config, arms),
        training_share=config.share_of_paper,
    )


def _in_rounds(config: MQARConfig, context: RunContext) -> dict[str, dict[str, Any]]:
    """Do all runs and return their metrics by name: the whole grid at once, or one learning rate after another.

    In the second case a model that has learnt to recall is dropped once its best learning rate is not the last one
    tried, or is near-perfect; a model that has not is tried with all.
    """
    task, metrics = config.task, {}
    models = every = [(arm, width) for width in task.widths for arm in task.arms]
    rates = sorted(task.learning_rates, reverse=True)
    for tried in [rates] if config.whole_grid else [[rate] for rate in rates]:
        runs = [run for model in models for rate in tried for run in config.runs(*model, rate)]
        metrics |= context.sweep([Run(run.name, run, work) for run in runs])
        done = by_learning_rate(list(metrics.values()))
        models = [model for model in models if _unsettled(done[model], tried[-1])]
    order = [run.name for model in every for rate in task.learning_rates for run in config.runs(*model, rate)]
    return {name: metrics[name] for name in order if name in metrics}


def _unsettled(rates: dict[float, list[dict[str, Any]]], last: float) -> bool:
    """Return whether a learning rate below the last one tried may be better than all.

    Accuracies below `LEARNT` do not tell learning rates apart.
    """
    best = choose(rates)
    if best is None:
        return True
    reached = mean([run["validation"]["accuracy"] for run in converged(rates[best])])
    return reached < LEARNT or (best == last and reached < paper.NEAR_PERFECT / 100)
