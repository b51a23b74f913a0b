"""The MQAR experiment: recall with a shared vocabulary, of rewritten keys, and of keys that stand apart from values.

Every model is trained with every learning rate of the variant's grid, in full or for a share of the training; the one
with the best validation accuracy is tested. The paper: §4.2 and its appendix on the Zoology MQAR benchmark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.mqar_figures import plot
from membydesign.experiments.mqar_results import compare, entries, learning_rates
from membydesign.experiments.mqar_runs import work
from membydesign.experiments.mqar_settings import PRESETS, VARIANTS, MQARConfig, Task
from membydesign.experiments.mqar_tables import notes, tables
from membydesign.experiments.record import Outcome
from membydesign.experiments.workspace import Workspace
from membydesign.training import Run

if TYPE_CHECKING:
    from membydesign.experiments.mqar_runs import MQARRun

__all__ = ["PRESETS", "TITLE", "VARIANTS", "MQARConfig", "Task", "plot", "run"]

TITLE = "MQAR with a shared vocabulary: recall, rewrites and blocks"


def run(config: MQARConfig, workspace: Workspace | None = None) -> Outcome:
    """Train and test every arm of a variant; what was done before in the workspace is not done again."""
    workspace = workspace or Workspace()
    every = list(config.runs())
    workspace.stage(f"training, {config.variant}" if config.probe == 1 else f"learning rates, {config.variant}")
    metrics = _sweep(every, workspace)
    compared = [metrics[each.name] for each in every]
    in_full = list(config.chosen_runs(learning_rates(compared)))
    if config.probe < 1:
        workspace.stage(f"training, {config.variant}")
        metrics |= _sweep(in_full, workspace)
    workspace.stage("comparing")
    found = entries(compared, [metrics[each.name] for each in in_full])
    comparisons, missing = compare(config.variant, found)
    return Outcome(
        config,
        comparisons,
        {"variant": config.variant, "share_of_paper": config.share_of_paper, "arms": found, "runs": metrics},
        [*notes(config, found), *missing],
        tables=tables(config, found),
    )


def _sweep(runs: list[MQARRun], workspace: Workspace) -> dict[str, dict[str, Any]]:
    return workspace.sweep([Run(each.name, each, work) for each in runs])
