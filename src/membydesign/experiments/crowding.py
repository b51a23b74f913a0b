r"""Random-key crowding: more keys than a memory has dimensions.

n writes at random addresses of dimension D = 16, then eight queries. Models train at n/D ≤ 4 and are tested up to 16.
No memory can hold more than D associations exactly; the question is how gracefully it degrades. The paper: appendix on
random keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from membydesign.data.recall import RandomKeys, overlap_statistics
from membydesign.data.seeds import generator
from membydesign.experiments.addressed import COMPARED, UPDATES
from membydesign.experiments.addressed_runs import PAPER_TRAINING
from membydesign.experiments.addressed_sweep import OPEN, OPEN_CROWDING, Choice, Results, run_all
from membydesign.experiments.crowding_figures import plot
from membydesign.experiments.crowding_runs import SCALES, CrowdingRun
from membydesign.experiments.record import Check, Outcome, RecordTable, highest, lowest

if TYPE_CHECKING:
    from membydesign.experiments.workspace import Workspace
    from membydesign.training import TrainSettings

__all__ = ["PRESETS", "TITLE", "CrowdingConfig", "plot", "run"]

TITLE = "Random-key crowding: what is lost when keys outnumber dimensions"
METRICS = {
    "cross_entropy": "Cross-entropy",
    "accuracy": "Accuracy",
    "calibrated_cross_entropy": "Cross-entropy after calibration",
    "best_scale": "Best factor of the logits",
    "logit_deviation": "Deviation of the logits over labels",
}


@dataclass(frozen=True)
class CrowdingConfig:
    """Settings of the whole experiment; attributes that `CrowdingRun` has too are the same there.

    Attributes:
        seeds: how many.
        compared: the updates that the paper compares.
        choices: answers to what the paper leaves open, run beside them.
        statistics_examples: sequences over which collisions are measured.
    """

    seeds: int = 3
    train: TrainSettings = PAPER_TRAINING
    milestones: tuple[int, ...] = (500, 1000)
    compared: tuple[str, ...] = COMPARED
    choices: tuple[Choice, ...] = OPEN_CROWDING
    task: RandomKeys = field(default_factory=RandomKeys)
    writes: tuple[int, ...] = (16, 32, 48, 64)
    test_writes: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256)
    test_examples: int = 1024
    statistics_examples: int = 256

    def runs(self, choice: Choice) -> list[CrowdingRun]:
        """One for each seed."""
        return [
            CrowdingRun(**shared, writes=self.writes, test_writes=self.test_writes) for shared in choice.of_seeds(self)
        ]

    @property
    def densities(self) -> dict[str, float]:
        """n/D of every n that is tested."""
        return {str(n): n / self.task.address_dim for n in self.test_writes}


_paper = CrowdingConfig()
PRESETS = {
    "smoke": CrowdingConfig(
        seeds=2,
        train=replace(PAPER_TRAINING, steps=30, batch_size=32, learning_rate=3e-3),
        milestones=(10,),
        choices=(OPEN[0], Choice("bayesian_layer", query_writes=True, steps=10)),
        test_writes=(16, 64, 128),
        test_examples=32,
        statistics_examples=16,
    ),
    "cpu": replace(_paper, choices=OPEN_CROWDING[:2]),
    "paper": _paper,
}
"""Two cores can do the paper's settings; `cpu` leaves out most of what the paper leaves open."""


def run(config: CrowdingConfig, workspace: Workspace) -> Outcome:
    """Train every model with every seed, and measure how each degrades."""
    choices = [*(Choice(update, seeds=config.seeds) for update in config.compared), *config.choices]
    results = run_all({choice.key: config.runs(choice) for choice in choices}, workspace)
    tests = {
        choice.key: {
            n: {name: results.test(choice.key, n, name)._asdict() for name in METRICS} for n in config.densities
        }
        for choice in choices
    }
    collisions = {str(n): _collisions(config, n) for n in config.test_writes}
    metrics = {"tests": tests, "collisions_after_projection": collisions}
    tables = [
        *(_by_density(config, results, name) for name in METRICS),
        _choices(config, results),
        _lengths(config, results),
        _statistics(collisions),
        results.training(),
    ]
    return Outcome(config, _claims(config, results), metrics, _notes(config, results), tests, tables)


def _collisions(config: CrowdingConfig, n: int) -> dict[str, float]:
    """How addresses collide as memories see them."""
    rng = generator("crowding", "statistics", n)
    addresses = config.task.sample(config.statistics_examples, n, rng).addresses
    return overlap_statistics(addresses[:, :n])


def _claims(config: CrowdingConfig, results: Results) -> list[Check]:
    """What the paper says: the Bayesian Layer lowest everywhere, the diagonal covariance rising most."""
    inside = "The Bayesian Layer has the lowest loss, within the range of training (n/D ≤ 4)"
    outside = "The Bayesian Layer has the lowest loss, beyond the range of training (n/D > 4)"
    claims: list[Check] = []
    for n, density in config.densities.items():
        claim = inside if int(n) <= max(config.writes) else outside
        losses = results.each(config.compared, n, "cross_entropy")
        claims.append(lowest(claim, f"cross-entropy at n/D = {density:g}", "Bayesian Layer", losses))
    first, (edge, last) = str(config.test_writes[0]), _ends(config)
    before = results.each(config.compared, first, "cross_entropy")
    for end, where in ((edge, "within the range of training"), (last, "beyond the range of training")):
        rise = {name: loss - before[name] for name, loss in results.each(config.compared, end, "cross_entropy").items()}
        what = f"rise of the loss from n/D = {config.densities[first]:g} to {config.densities[end]:g}"
        claims.append(
            highest(f"The diagonal covariance degrades most sharply, {where}", what, "Diagonal covariance", rise)
        )
    return claims


def _by_density(config: CrowdingConfig, results: Results, name: str) -> RecordTable:
    rows = [
        [f"{density:g}", *(str(results.test(update, n, name)) for update in config.compared)]
        for n, density in config.densities.items()
    ]
    note = {
        "cross_entropy": f"Of a uniform guess: {math.log(config.task.labels):.3f}.",
        "accuracy": f"Of a guess: {1 / config.task.labels:.4f}.",
        "best_scale": "Below one: the model is too sure of itself. Found on validation sequences.",
    }.get(name, "")
    headings = ["n/D", *(UPDATES[update].title for update in config.compared)]
    return RecordTable(f"{METRICS[name]} against n/D", headings, rows, note)


def _ends(config: CrowdingConfig) -> tuple[str, str]:
    """n at the edge of training, and the largest."""
    return str(max(config.writes)), str(config.test_writes[-1])


def _choices(config: CrowdingConfig, results: Results) -> RecordTable:
    names = {"cross-entropy": "cross_entropy", "calibrated": "calibrated_cross_entropy", "accuracy": "accuracy"}
    columns = {
        f"{word}, n/D = {config.densities[n]:g}": (n, name) for n in _ends(config) for word, name in names.items()
    }
    return results.of_choices(config.choices, columns)


def _lengths(config: CrowdingConfig, results: Results) -> RecordTable:
    columns = {f"n/D = {config.densities[n]:g}": (n, "cross_entropy") for n in _ends(config)}
    steps = sorted({*config.milestones, config.train.steps})
    return results.of_lengths(config.compared, steps, columns, "cross-entropy")


def _statistics(collisions: dict[str, dict[str, float]]) -> RecordTable:
    headings = ["n", *next(iter(collisions.values()))]
    rows = [[n, *row.values()] for n, row in collisions.items()]
    note = "Measured after the projection to D = 16, in the addresses that memories see."
    return RecordTable("How addresses collide", [h.replace("_", " ") for h in headings], rows, note)


def _notes(config: CrowdingConfig, results: Results) -> list[str]:
    """What decides the results, from the numbers."""
    last = str(config.test_writes[-1])
    density, ours = config.densities[last], UPDATES["bayesian_layer"].title
    raw, calibrated, right = (
        results.each(config.compared, last, name) for name in ("cross_entropy", "calibrated_cross_entropy", "accuracy")
    )
    found = [
        "Query tokens do not write unless a row says so; time passes at them as at all tokens, so that GLA-style "
        "memories go on fading while they are asked. Labels are drawn independently for every write.",
        f"At n/D = {density:g} the Bayesian Layer's cross-entropy is {raw[ours]:.3f}, and the lowest is "
        f"{_least(raw)}. With the best single factor of the logits, found on other sequences, it is "
        f"{calibrated[ours]:.3f}, and the lowest is {_least(calibrated)}: what one factor for all sequences leaves "
        "of a difference is not overall confidence. Accuracies: "
        f"{', '.join(f'{name} {x:.3f}' for name, x in right.items())}.",
        f"The factor is looked for between {SCALES[0]:.2f} and {SCALES[-1]:.2f}; a best factor at an end may lie "
        "beyond it.",
    ]
    writing = [choice for choice in config.choices if choice.query_writes]
    if writing:
        changes = "; ".join(
            f"{UPDATES[c.default].title} {results.moves(c, last, 'cross_entropy')} "
            f"({results.by_choice[c.key][0]['steps']} steps)"
            for c in writing
        )
        found.append(f"If query tokens write, cross-entropies at n/D = {density:g} change: {changes}.")
    return found


def _least(values: dict[str, float]) -> str:
    name = min(values, key=lambda each: values[each])
    return f"{values[name]:.3f} ({name})"
