"""Build the tables and notes of the comparison."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from membydesign.design import catalogue
from membydesign.experiments.compare.calibration import NOISES, named
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.experiments.compare.config import CompareConfig

    Results = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
    """Results by design and task, one per seed."""

NONE = "—"
CONSTANT = ("as told", "smaller", "larger")
"""The noises of constant size."""


def reason(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why a design has no numbers for a task; empty if it has."""
    for each in results:
        if "cannot" in each:
            return str(each["cannot"])
        if "failed" in each:
            return f"failed: {each['failed']}"
    return "" if results else "not run"


def values(results: Sequence[Mapping[str, Any]], *path: str) -> list[float]:
    """Return a number of the results, one per seed; empty if there is none."""
    if reason(results):
        return []
    found = []
    for each in results:
        value: Any = each
        for name in path:
            value = value[name]
        found.append(float(value))
    return found


def shown(results: Sequence[Mapping[str, Any]], *path: str, decimals: int = 2) -> str:
    """Format a number of the results: its mean, and its deviation if there are several seeds."""
    numbers = values(results, *path)
    if not numbers:
        return NONE
    spread = f" ± {stdev(numbers):.{decimals}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{decimals}f}{spread}"


def with_error(results: Sequence[Mapping[str, Any]], *path: str, decimals: int = 3) -> str:
    """Format a number of the results: its mean over seeds, and the standard error of that mean."""
    numbers = values(results, *path)
    if not numbers:
        return NONE
    errors = values(results, *path[:-1], f"{path[-1]} error")
    error = math.hypot(*errors) / len(errors)
    return f"{mean(numbers):.{decimals}f} ± {error:.{decimals}f}"


def recall_tests(config: CompareConfig) -> list[str]:
    """Return the names of the tests of learned recall."""
    return [f"n_f = {writes}, ρ = {rho:.2f}" for writes, rho in config.recall.tests]


def crowding_tests(config: CompareConfig) -> list[str]:
    """Return the names of the tests of random keys."""
    return [f"n = {writes}" for writes in config.crowding.tests]


def tables(config: CompareConfig, designs: Results) -> list[RecordTable]:
    """Build the summary, and a table for each task."""
    return [
        _summary(config, designs),
        _collision(config, designs),
        _accuracies("Learned recall: accuracy", designs, "recall", recall_tests(config), _RECALL.format(config=config)),
        _accuracies(
            "Random keys: accuracy", designs, "crowding", crowding_tests(config), _CROWDING.format(config=config)
        ),
        _cross_entropies(config, designs),
        *(_calibration(designs, name, title, decimals) for name, title, decimals in _JUDGED),
        _by_writes(config, designs),
        _work(designs),
        _reasons(designs),
    ]


_RECALL = (
    "Trained with {config.recall.distractor_writes} distractor writes and overlaps {config.recall.overlap}. The budget "
    "of {config.recall.budget} numbers per head is spent on value columns (D×M: numbers kept)."
)
_CROWDING = (
    "Trained with {config.crowding.writes} writes. The budget of {config.crowding.budget} numbers per head is spent on "
    "key rows (D×M: numbers kept)."
)
_JUDGED = (
    ("coverage 90", "Calibration: coverage of 90 % intervals", 3),
    ("coverage 50", "Calibration: coverage of 50 % intervals", 3),
    ("log score", "Calibration: log score per value, larger is better", 2),
    ("never written", "Calibration: keys that were never written, detected by variance (area under the curve)", 3),
)


def _summary(config: CompareConfig, designs: Results) -> RecordTable:
    hardest, most = recall_tests(config)[-1], crowding_tests(config)[-1]
    rows = []
    for name, of in designs.items():
        calibration = of["calibration"]
        rows.append(
            [
                name,
                catalogue[name].exactness,
                shown(of["collision"], "at_the_end"),
                shown(of["recall"], recall_tests(config)[0], "accuracy"),
                shown(of["recall"], hardest, "accuracy"),
                shown(of["crowding"], most, "accuracy"),
                with_error(calibration, "as told", "coverage 90"),
                with_error(calibration, "larger", "coverage 90"),
                shown(calibration, "as told", "never written", decimals=3),
            ]
        )
    headings = [
        "design",
        "exactness",
        "collision: margin",
        f"recall, {recall_tests(config)[0]}",
        f"recall, {hardest}",
        f"random keys, {most}",
        "90 % intervals, noise as told",
        "90 % intervals, larger noise",
        "never written",
    ]
    note = (
        f"At most {config.recall.budget} numbers per head in the learned tasks. Margin after all distractor writes; "
        "accuracies; coverage; area under the curve. — : the design cannot do it or was not run, see the last table."
    )
    return RecordTable("Every design", headings, rows, note)


def _collision(config: CompareConfig, designs: Results) -> RecordTable:
    rows = []
    for name, of in designs.items():
        found = of["collision"]
        if reason(found):
            rows.append([name, NONE, NONE, NONE, NONE])
            continue
        numbers = [shown(found, each, decimals=3) for each in ("before_distractors", "at_the_end")]
        rows.append([name, found[0]["sizes"], *numbers, str(found[0]["below_chance_from"])])
    note = (
        f"Two keys with overlap {config.collision.schedule.overlap}, nothing is learned: ℓ² = "
        f"{config.collision.schedule.process_noise}, r² = {config.collision.schedule.write_noise}, λ = ℓ², no decay, "
        "and a new layer's starting values for all other parameters."
    )
    headings = ["design", "D×M: numbers kept", "margin before", "margin after all distractors", "below chance from"]
    return RecordTable("Collision", headings, rows, note)


def _accuracies(title: str, designs: Results, task: str, tests: Sequence[str], note: str) -> RecordTable:
    rows = []
    for name, of in designs.items():
        found = of[task]
        sizes = NONE if reason(found) else found[0]["sizes"]
        rows.append([name, sizes, *(shown(found, test, "accuracy") for test in tests)])
    return RecordTable(title, ["design", "D×M: numbers kept", *tests], rows, note)


def _cross_entropies(config: CompareConfig, designs: Results) -> RecordTable:
    rows = [
        [
            name,
            *(shown(of["recall"], test, "cross_entropy") for test in recall_tests(config)),
            *(shown(of["crowding"], test, "cross_entropy") for test in crowding_tests(config)),
        ]
        for name, of in designs.items()
    ]
    headings = [
        "design",
        *(f"recall, {test}" for test in recall_tests(config)),
        *(f"random keys, {test}" for test in crowding_tests(config)),
    ]
    return RecordTable("Cross-entropy at the queries", headings, rows)


def _calibration(designs: Results, number: str, title: str, decimals: int) -> RecordTable:
    rows = []
    for name, of in designs.items():
        found = of["calibration"]
        if not reason(found):
            show = with_error if number.startswith("coverage") else shown
            rows.append([name, *(show(found, noise, number, decimals=decimals) for noise in NOISES)])
    note = "; ".join(f"{name}: {what}" for name, what in NOISES.items())
    if number.startswith("coverage"):
        note += ". Means over seeds, and their standard errors over streams."
    return RecordTable(title, ["design", *NOISES], rows, note)


def _by_writes(config: CompareConfig, designs: Results) -> RecordTable:
    doublings = [named(times) for times in config.calibration.doublings()]
    rows = []
    for name, of in designs.items():
        found = of["calibration"]
        for noise in () if reason(found) else CONSTANT:
            means = (f"{mean(values(found, noise, 'by writes', each)):.3f}" for each in doublings)
            rows.append([name, noise, *means])
    note = (
        "By the number of writes before the prediction, where the noise is constant: how long a design takes to learn "
        "its size. Means over seeds."
    )
    title = "Calibration: coverage of 90 % intervals while the size of the noise is learned"
    return RecordTable(title, ["design", "noise", *doublings], rows, note)


def _work(designs: Results) -> RecordTable:
    rows = []
    for name, of in designs.items():
        for task in ("recall", "crowding"):
            found = of[task]
            if not reason(found):
                seconds = mean(values(found, "seconds"))
                loss = shown(found, "training_loss", decimals=4)
                rows.append([name, task, found[0]["parameters"], len(found), loss, round(seconds)])
    commits = sorted({each["commit"][:12] for of in designs.values() for results in of.values() for each in results})
    note = f"Seconds on a machine that did other work too. Runs were made by commits {', '.join(commits)}."
    headings = ["design", "task", "parameters", "seeds", "training loss", "seconds per run"]
    return RecordTable("Training", headings, rows, note)


def _reasons(designs: Results) -> RecordTable:
    rows = [
        [name, task, why] for name, of in designs.items() for task, results in of.items() if (why := reason(results))
    ]
    return RecordTable("What a design cannot do", ["design", "task", "why"], rows)


def notes(config: CompareConfig, designs: Results) -> list[str]:
    """Explain how the comparison was made."""
    del designs
    return [
        "The learned tasks use one layer of two heads behind the same scaffold (`MemoryLayer`): designs differ in the "
        "update, in the sources of their own step parameters, and in how they spend the budget. Keys and queries are "
        "the addresses; a design whose keys are weights takes softmax(s · address) with a learned s. Queries write "
        "too, as any token does. Seeds vary weights and training data; tests are the same sequences for every design.",
        f"Calibration: {config.calibration.streams} streams of {config.calibration.writes} writes, judged in their "
        f"second half; memory is drawn from the prior, r² = {config.calibration.write_noise} is stated. Intervals and "
        "log scores are those of the predictive density that the design states itself. Nothing is trained, and "
        "parameters that no filter needs for a Gaussian memory at rest have a new layer's starting values.",
    ]
