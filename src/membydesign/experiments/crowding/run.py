"""Run random-key crowding: how do memories degrade when keys outnumber dimensions?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.data.recall import overlap_statistics
from membydesign.data.seeds import generator
from membydesign.experiments.crowding.claims import claims
from membydesign.experiments.crowding.config import PRESETS, CrowdingConfig
from membydesign.experiments.crowding.figures import plot
from membydesign.experiments.crowding.tables import METRICS, notes, tables
from membydesign.experiments.crowding.unlearned import unlearned
from membydesign.reports.record import Outcome

if TYPE_CHECKING:
    from membydesign.experiments.shared.run_context import RunContext

__all__ = ["PRESETS", "TITLE", "CrowdingConfig", "plot", "run"]

TITLE = "Random-key crowding: what is lost when keys outnumber dimensions"


def run(config: CrowdingConfig, context: RunContext) -> Outcome:
    """Train every model with every seed, and measure how it degrades."""
    results = config.run_all(context)
    tests = {
        key: {n: {name: results.test(key, n, name)._asdict() for name in METRICS} for n in config.densities}
        for key in results.by_choice
    }
    collisions = {str(n): _collisions(config, n) for n in config.test_writes}
    without_learning = unlearned(config)
    metrics = {"tests": tests, "collisions_after_projection": collisions, "without_learning": without_learning}
    return Outcome(
        config,
        claims(config, results),
        metrics,
        notes(config, results),
        tests,
        tables(config, results, collisions, without_learning),
        training_share=config.share_of_paper,
    )


def _collisions(config: CrowdingConfig, n: int) -> dict[str, float]:
    """Measure how the addresses that memories see collide."""
    rng = generator("crowding", "statistics", n)
    addresses = config.task.sample(config.statistics_examples, n, rng).addresses
    return overlap_statistics(addresses[:, :n])
