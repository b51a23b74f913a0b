r"""Learned recall under controlled collisions: who still finds the target after many distractor writes?

K = 8 pairs of a target and a distractor that overlap by ρ. Models train with $n_f \le 8$ distractor writes and
ρ ≤ 0.80, and are tested up to $n_f = 256$ and ρ = 0.95. The paper: §4.1, panels (c, d), and its appendix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from membydesign.data.recall import Collisions
from membydesign.experiments.addressed import COMPARED, PAPER_UPDATES, UPDATES
from membydesign.experiments.addressed_runs import PAPER_TRAINING
from membydesign.experiments.addressed_sweep import OPEN, Choice, Results, run_all
from membydesign.experiments.recall_figures import plot
from membydesign.experiments.recall_runs import RecallRun
from membydesign.experiments.recall_tables import MARGINS, METRICS, distance, notes, tables
from membydesign.experiments.record import Bound, Check, Comparison, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.experiments.addressed_sweep import Spread
    from membydesign.experiments.workspace import Workspace
    from membydesign.training import TrainSettings

__all__ = ["PRESETS", "TITLE", "RecallConfig", "plot", "run"]

TITLE = "Learned recall: far more distractor writes, and larger overlaps, than in training"
STABLE = 0.05
"""By how much a margin may move and still count as the same: our reading of "stable", "plateau" and "tracks"."""


@dataclass(frozen=True)
class RecallConfig:
    """Settings of the whole experiment; attributes that `RecallRun` has too are the same there.

    Attributes:
        seeds: how many.
        compared: the updates that the paper compares.
        choices: answers to what the paper leaves open, run beside them.
        longest: $n_f$ at the end of panel (c).
        largest: ρ at the end of panel (d).
    """

    seeds: int = 3
    train: TrainSettings = PAPER_TRAINING
    milestones: tuple[int, ...] = (500, 1000)
    compared: tuple[str, ...] = COMPARED
    choices: tuple[Choice, ...] = OPEN
    task: Collisions = field(default_factory=Collisions)
    test_examples: int = 512
    test_distractor_writes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    test_overlaps: tuple[float, ...] = (0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95)

    @property
    def longest(self) -> str:
        """$n_f$ at the end of panel (c)."""
        return str(self.test_distractor_writes[-1])

    @property
    def largest(self) -> str:
        """ρ at the end of panel (d)."""
        return f"{self.test_overlaps[-1]:.2f}"

    @property
    def edge(self) -> str:
        """The $n_f$ of panel (c) that is nearest to the most of training."""
        return str(min(self.test_distractor_writes, key=lambda n: abs(n - RecallRun.distractor_writes[-1])))

    @property
    def panels(self) -> dict[str, list[str]]:
        """The tests of both panels, as they are named in metrics."""
        return {
            "distractor_writes": [str(n) for n in self.test_distractor_writes],
            "overlap": [f"{x:.2f}" for x in self.test_overlaps],
        }

    def runs(self, choice: Choice) -> list[RecallRun]:
        """One for each seed."""
        return [
            RecallRun(**shared, test_distractor_writes=self.test_distractor_writes, test_overlaps=self.test_overlaps)
            for shared in choice.of_seeds(self)
        ]


_paper = RecallConfig()
PRESETS = {
    "smoke": RecallConfig(
        seeds=2,
        train=replace(PAPER_TRAINING, steps=30, batch_size=32, learning_rate=3e-3),
        milestones=(10,),
        choices=(OPEN[0], Choice("bayesian_layer", query_writes=True, steps=10)),
        test_examples=16,
        test_distractor_writes=(1, 8, 32),
        test_overlaps=(0.60, 0.80, 0.95),
    ),
    "cpu": replace(_paper, choices=OPEN[:2]),
    "paper": _paper,
}
"""Two cores can do the paper's settings; `cpu` leaves out most of what the paper leaves open."""


def run(config: RecallConfig, workspace: Workspace) -> Outcome:
    """Train every model with every seed, and compare what they do far from their training."""
    choices = [*(Choice(update, seeds=config.seeds) for update in config.compared), *config.choices]
    results = run_all({choice.key: config.runs(choice) for choice in choices}, workspace)

    def _tests(test: Callable[..., Spread], key: str) -> dict[str, Any]:
        return {
            panel: {x: {name: test(key, panel, x, name)._asdict() for name in METRICS} for x in places}
            for panel, places in config.panels.items()
        }

    tests = {update: _tests(results.test, update) for update in config.compared}
    others = {
        choice.key: {
            "default": _tests(lambda *path, choice=choice: results.beside(choice, *path[1:])[0], choice.default),
            "alternative": _tests(results.test, choice.key),
        }
        for choice in config.choices
    }
    metrics = {"tests": tests, "choices": others}
    comparisons = [check for name in MARGINS for check in _claims(config, results, name)]
    return Outcome(config, comparisons, metrics, notes(config, results), metrics, tables(config, results))


def _claims(config: RecallConfig, results: Results, margin: str) -> list[Check]:
    """What the paper says of panels (c) and (d), for one kind of margin."""
    kind, end, far = MARGINS[margin], config.longest, config.largest
    edge = config.edge

    def moved(update: str, since: str = edge) -> float:
        return (
            results.test(update, "distractor_writes", end, margin).mean
            - results.test(update, "distractor_writes", since, margin).mean
        )

    def at(update: str) -> float:
        return results.test(update, "overlap", far, margin).mean

    c = (
        f"(c) Distractor writes to {end} at ρ = {RecallRun.test_overlap:.2f}: the Bayesian Layer is stable, "
        f"DeltaNet-style and the reset plateau, Linear Attention and GLA-style degrade ({kind})"
    )
    d = (
        f"(d) Overlaps to {far} at n_f = {RecallRun.test_writes}: DeltaNet-style and the reset cross below zero, the "
        f"Bayesian Layer goes on favouring the target ({kind})"
    )
    change, before = f"change from n_f = {edge} to {end}", str(config.test_distractor_writes[-2])
    still = f"plateaus: change from n_f = {before} to {end}, either way"
    delta, reset = "deltanet_style", "covariance_reset"
    claims: list[Check] = [
        Bound(c, f"Bayesian Layer: {change}", f"≥ {-STABLE}", moved("bayesian_layer")),
        Bound(c, f"Linear Attention degrades: {change}", f"< {-STABLE}", moved("linear_attention")),
        Bound(c, f"GLA-style degrades: {change}", f"< {-STABLE}", moved("gla_style")),
        Bound(c, f"DeltaNet-style {still}", f"≤ {STABLE}", abs(moved(delta, before))),
        Bound(c, f"Covariance reset {still}", f"≤ {STABLE}", abs(moved(reset, before))),
        Bound(d, f"Bayesian Layer at ρ = {far}", "> 0", at("bayesian_layer")),
        Bound(d, f"DeltaNet-style at ρ = {far}", "< 0", at(delta)),
        Bound(d, f"Covariance reset at ρ = {far}", "< 0", at(reset)),
    ]
    both = [update for update in PAPER_UPDATES if moved(update) >= -STABLE and at(update) > 0]
    claims.append(
        Comparison(
            f"Only the Bayesian Layer holds across both axes ({kind})",
            f"moves by {STABLE} at most in (c), above 0 at ρ = {far} in (d)",
            "Bayesian Layer",
            ", ".join(UPDATES[update].title for update in both) or "none",
            0.0,
        )
    )
    for update in (reset, "covariance_reset_learned"):
        if update in results.by_choice:
            seeds = results.seeds(update)
            track = f"{UPDATES[update].title}: tracks DeltaNet-style on both axes ({kind}, seeds: {seeds})"
            largest = distance(config, results, update, margin)
            claims.append(Bound(track, "largest distance of two means", f"≤ {STABLE}", largest))
    return claims
