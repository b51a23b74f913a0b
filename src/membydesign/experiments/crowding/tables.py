"""Build the tables and notes of random-key crowding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from membydesign.experiments.crowding.config import SCALES
from membydesign.experiments.shared.addressed import SMALL_NOISE, UPDATES
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from membydesign.experiments.crowding.config import CrowdingConfig
    from membydesign.experiments.shared.addressed_sweep import Results

METRICS = {
    "cross_entropy": "Cross-entropy",
    "accuracy": "Accuracy",
    "calibrated_cross_entropy": "Cross-entropy after calibration",
    "best_scale": "Best factor of the logits",
    "logit_deviation": "Deviation of the logits over labels",
}


def tables(
    config: CrowdingConfig,
    results: Results,
    collisions: dict[str, dict[str, float]],
    without_learning: dict[str, dict[str, dict[str, float]]],
) -> list[RecordTable]:
    """Build the tables of everything that is measured."""
    return [
        *(_by_density(config, results, name) for name in METRICS),
        _choices(config, results),
        *_small_noise(config, results),
        _without_learning(config, without_learning),
        _lengths(config, results),
        _statistics(collisions),
        results.training(),
    ]


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


def ends(config: CrowdingConfig) -> tuple[str, str]:
    """Return n at the edge of training, and the largest."""
    return str(max(config.writes)), str(config.test_writes[-1])


def _choices(config: CrowdingConfig, results: Results) -> RecordTable:
    names = {"cross-entropy": "cross_entropy", "calibrated": "calibrated_cross_entropy", "accuracy": "accuracy"}
    columns = {
        f"{word}, n/D = {config.densities[n]:g}": (n, name) for n in ends(config) for word, name in names.items()
    }
    return results.of_choices(config.choices, columns)


def _small_noise(config: CrowdingConfig, results: Results) -> list[RecordTable]:
    """Tabulate process noise without a floor: the loss at every n, and the ℓ² that each layer learned."""
    small = [choice for choice in config.choices if choice.key in SMALL_NOISE]
    if not small:
        return []
    compared = ["bayesian_layer", *(choice.key for choice in small)]
    rows = [
        [
            UPDATES[key].title,
            results.seeds(key),
            *(str(results.test(key, n, "cross_entropy")) for n in config.densities),
        ]
        for key in compared
    ]
    headings = ["update", "seeds", *(f"n/D = {density:g}" for density in config.densities.values())]
    losses = RecordTable("Process noise without a floor: cross-entropy", headings, rows)
    last = str(config.test_writes[-1])
    learned = []
    for choice in small:
        noises = [run["tests"][str(run["steps"])][last]["noises"] for run in results.by_choice[choice.key]]
        layers = sorted(name for name in noises[0] if name.startswith("process_noise"))
        means = [f"{sum(noise[name] for noise in noises) / len(noises):.3g}" for name in layers]
        learned.append([UPDATES[choice.key].title, *means])
    headings = ["update", *(f"layer {i}" for i in range(1, len(learned[0])))]
    note = f"Mean over tokens, heads and seeds, at n/D = {config.densities[last]:g}."
    return [losses, RecordTable("Process noise without a floor: the ℓ² of each layer", headings, learned, note)]


def _without_learning(config: CrowdingConfig, measured: dict[str, dict[str, dict[str, float]]]) -> RecordTable:
    rows = [
        [title, *(f"{cells[n]['cross_entropy']:.3f}" for n in config.densities)] for title, cells in measured.items()
    ]
    headings = ["update", *(f"n/D = {density:g}" for density in config.densities.values())]
    note = "One memory, one-hot labels as values; reads are logits up to a factor chosen for each n on other sequences."
    return RecordTable("Without learning: cross-entropy", headings, rows, note)


def _lengths(config: CrowdingConfig, results: Results) -> RecordTable:
    columns = {f"n/D = {config.densities[n]:g}": (n, "cross_entropy") for n in ends(config)}
    steps = sorted({*config.milestones, config.train.steps})
    return results.of_lengths(config.compared, steps, columns, "cross-entropy")


def _statistics(collisions: dict[str, dict[str, float]]) -> RecordTable:
    headings = ["n", *next(iter(collisions.values()))]
    rows = [[n, *row.values()] for n, row in collisions.items()]
    note = "Measured after the projection to D = 16, in the addresses that memories see."
    return RecordTable("How addresses collide", [h.replace("_", " ") for h in headings], rows, note)


def notes(config: CrowdingConfig, results: Results) -> list[str]:
    """Explain the results, from the numbers."""
    last = str(config.test_writes[-1])
    density, ours = config.densities[last], UPDATES["bayesian_layer"].title
    raw, calibrated, right = (
        results.each(config.compared, last, name) for name in ("cross_entropy", "calibrated_cross_entropy", "accuracy")
    )
    remarks = [
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
        remarks.append(f"If query tokens write, cross-entropies at n/D = {density:g} change: {changes}.")
    return remarks


def _least(values: dict[str, float]) -> str:
    name = min(values, key=lambda each: values[each])
    return f"{values[name]:.3f} ({name})"
