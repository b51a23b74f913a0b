"""The tables of learned recall, and what its numbers say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.experiments.addressed import UPDATES
from membydesign.experiments.record import RecordTable

if TYPE_CHECKING:
    from membydesign.experiments.addressed_sweep import Choice, Results
    from membydesign.experiments.recall import RecallConfig

MARGINS = {"pairwise_margin": "pairwise margin", "full_margin": "margin under the full softmax"}
METRICS = ("accuracy", *MARGINS)


def tables(config: RecallConfig, results: Results, choices: list[Choice]) -> list[RecordTable]:
    """Everything that is measured, as tables."""
    return [
        *(_panel(config, results, name) for name in METRICS),
        _ranges(config, results),
        _choices(config, results, choices),
        _lengths(config, results),
        results.training(),
    ]


def distance(config: RecallConfig, results: Results, update: str, margin: str) -> float:
    """The largest difference of two mean margins over both panels."""
    cells = [("distractor_writes", str(n)) for n in config.test_distractor_writes]
    cells += [("overlap", f"{x:.2f}") for x in config.test_overlaps]
    return max(
        abs(results.test(update, *cell, margin).mean - results.test("deltanet_style", *cell, margin).mean)
        for cell in cells
    )


def _panel(config: RecallConfig, results: Results, name: str) -> RecordTable:
    """Both panels for one metric, mean ± deviation over seeds."""
    cells = [("distractor_writes", str(n), f"n_f = {n}") for n in config.test_distractor_writes]
    cells += [("overlap", f"{x:.2f}", f"ρ = {x:.2f}") for x in config.test_overlaps]
    rows = [
        [heading, *(str(results.test(update, panel, x, name)) for update in config.compared)]
        for panel, x, heading in cells
    ]
    title = {"accuracy": "Accuracy"}.get(name) or MARGINS[name].capitalize()
    note = (
        f"n_f at ρ = 0.80, ρ at n_f = 64; mean ± one deviation over {config.seeds} seeds; chance of accuracy is 1/16."
    )
    return RecordTable(f"{title} at the queries", ["test", *(UPDATES[u].title for u in config.compared)], rows, note)


def _ranges(config: RecallConfig, results: Results) -> RecordTable:
    ranges = {
        "training_range": "training: n_f ≤ 8, ρ from 0.60 to 0.80",
        "more_distractor_writes": "n_f of 16, 32, 64, ρ from 0.60 to 0.80",
        "larger_overlap": "n_f ≤ 8, ρ from 0.85 to 0.95",
    }
    rows = [
        [title, UPDATES[update].title] + [str(results.test(update, key, name)) for name in (*METRICS, "cross_entropy")]
        for key, title in ranges.items()
        for update in config.compared
    ]
    headings = ["range", "update", "accuracy", "pairwise margin", "full margin", "cross-entropy"]
    return RecordTable("The paper's test ranges", headings, rows)


def _choices(config: RecallConfig, results: Results, choices: list[Choice]) -> RecordTable:
    """What the paper leaves open, side by side at the ends of both panels."""
    rows = []
    for choice in choices:
        ends = (("distractor_writes", config.longest), ("overlap", config.largest))
        cells = [str(results.test(choice.key, *end, name)) for end in ends for name in METRICS]
        inside = str(results.test(choice.key, "training_range", "cross_entropy"))
        rows.append([choice.title, results.seeds(choice.key), inside, *cells])
    ends = [f"{name}, {end}" for end in (f"n_f = {config.longest}", f"ρ = {config.largest}")
            for name in ("accuracy", "pairwise", "full")]  # fmt: skip
    note = "The same training range, and very different ends: what the paper leaves open decides much of it."
    return RecordTable("What the paper leaves open", ["model", "seeds", "cross-entropy in range", *ends], rows, note)


def _lengths(config: RecallConfig, results: Results) -> RecordTable:
    """How the ends of both panels move with the length of training."""
    steps = sorted({*config.milestones, config.train.steps})
    ends = [("distractor_writes", config.longest), ("overlap", config.largest)]
    rows = [
        [UPDATES[u].title, *(str(results.test(u, *end, "pairwise_margin", step=s)) for end in ends for s in steps)]
        for u in config.compared
    ]
    places = [f"n_f = {config.longest}", f"ρ = {config.largest}"]
    headings = ["update", *(f"{place}, {step} steps" for place in places for step in steps)]
    return RecordTable("The length of training: pairwise margin", headings, rows)


def notes(config: RecallConfig, results: Results) -> list[str]:
    """What decides the results, from the numbers."""
    end, far = ("distractor_writes", config.longest), ("overlap", config.largest)

    def at(key: str, place: tuple[str, str]) -> str:
        return str(results.test(key, *place, "pairwise_margin"))

    found = [
        "Query tokens do not write here unless a row says so: they carry no value. Their write key is zero, which "
        "leaves every memory as it is.",
        "A pairwise margin looks at two labels of sixteen: a model can prefer the target to its distractor and still "
        "answer something else, so accuracy and the margin under the full softmax stand beside it.",
        "All memories read at every token, a last RMSNorm precedes the answer, linear maps start as torch starts them, "
        "and gates and noises start from constants: β at 0.5, ℓ² at 0.05, GLA's gates at 0.99.",
    ]
    if "covariance_reset_learned" in results.by_choice:
        fixed, learned = (
            distance(config, results, update, "pairwise_margin")
            for update in ("covariance_reset", "covariance_reset_learned")
        )
        found.append(
            f"The reset with ℓ² fixed at 0.05 has a gain of one half for ever and is up to {fixed:.3f} from "
            f"DeltaNet-style; with a learned ℓ² it is the same update in other letters, up to {learned:.3f} from it."
        )
    if "bayesian_layer_from_069" in results.by_choice:
        low, high = "bayesian_layer", "bayesian_layer_from_069"
        losses = [results.test(key, "training_range", "cross_entropy").mean for key in (low, high)]
        found.append(
            f"Where ℓ² starts: from 0.05 and from 0.69 the Bayesian Layer ends with cross-entropies of "
            f"{losses[0]:.4f} and {losses[1]:.4f} in the training range, and with pairwise margins of {at(low, end)} "
            f"and {at(high, end)} at n_f = {config.longest}, {at(low, far)} and {at(high, far)} at ρ = "
            f"{config.largest}."
        )
    writing = [update for update in config.compared if f"{update}+query_writes" in results.by_choice]
    if writing:
        changes = (f"{UPDATES[u].title} {at(u, far)} → {at(f'{u}+query_writes', far)}" for u in writing)
        found.append(f"If query tokens write, pairwise margins at ρ = {config.largest} change: {'; '.join(changes)}.")
    return found
