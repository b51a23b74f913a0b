"""Run learned recall under controlled collisions: which models still find the target after many distractor writes?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.recall.claims import claims
from membydesign.experiments.recall.config import PRESETS, RecallConfig
from membydesign.experiments.recall.figures import plot
from membydesign.experiments.recall.tables import MARGINS, METRICS, notes, tables
from membydesign.reports.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.experiments.shared.addressed_sweep import Spread
    from membydesign.experiments.shared.run_context import RunContext

__all__ = ["PRESETS", "TITLE", "RecallConfig", "plot", "run"]

TITLE = "Learned recall: far more distractor writes, and larger overlaps, than in training"


def run(config: RecallConfig, context: RunContext) -> Outcome:
    """Train every model with every seed, and test it far beyond the range of training."""
    results = config.run_all(context)

    def _tests(test: Callable[..., Spread], key: str) -> dict[str, Any]:
        return {
            panel: {x: {name: test(key, panel, x, name)._asdict() for name in METRICS} for x in places}
            for panel, places in config.panels.items()
        }

    tests = {update: _tests(results.test, update) for update in config.compared}
    others = {
        choice.key: {
            "default": _tests(lambda *path, choice=choice: results.compared(choice, *path[1:])[0], choice.default),
            "alternative": _tests(results.test, choice.key),
        }
        for choice in config.choices
    }
    metrics = {"tests": tests, "choices": others}
    comparisons = [check for name in MARGINS for check in claims(config, results, name)]
    return Outcome(
        config,
        comparisons,
        metrics,
        notes(config, results),
        metrics,
        tables(config, results),
        training_share=config.share_of_paper,
    )
