"""Build the tables and notes of learned recall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.experiments.recall.config import RecallRun
from membydesign.experiments.shared.addressed import UPDATES
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from membydesign.experiments.recall.config import RecallConfig
    from membydesign.experiments.shared.addressed_sweep import Results

MARGINS = {"pairwise_margin": "pairwise margin", "full_margin": "margin under the full softmax"}
METRICS = ("accuracy", *MARGINS)


def tables(config: RecallConfig, results: Results) -> list[RecordTable]:
    """Build the tables of everything that is measured."""
    return [
        *(_panel(config, results, name) for name in METRICS),
        _ranges(config, results),
        _choices(config, results),
        _lengths(config, results),
        results.training(),
    ]


def distance(config: RecallConfig, results: Results, update: str, margin: str) -> float:
    """Return the largest difference of mean margins to DeltaNet-style over both panels, for the same seeds."""
    seeds = results.seeds(update)
    cells = [(panel, x, margin) for panel, places in config.panels.items() for x in places]
    pairs = [[results.test(u, *cell, seeds=seeds).mean for u in (update, "deltanet_style")] for cell in cells]
    return max(abs(ours - theirs) for ours, theirs in pairs)


def _panel(config: RecallConfig, results: Results, name: str) -> RecordTable:
    """Tabulate both panels for one metric, mean ± deviation over seeds."""
    cells = [("distractor_writes", str(n), f"n_f = {n}") for n in config.test_distractor_writes]
    cells += [("overlap", f"{x:.2f}", f"ρ = {x:.2f}") for x in config.test_overlaps]
    rows = [
        [heading, *(str(results.test(update, panel, x, name)) for update in config.compared)]
        for panel, x, heading in cells
    ]
    title = {"accuracy": "Accuracy"}.get(name) or MARGINS[name].capitalize()
    note = (
        f"n_f at ρ = {RecallRun.test_overlap:.2f}, ρ at n_f = {RecallRun.test_writes}; mean ± one deviation over "
        f"{config.seeds} seeds; chance of accuracy is 1/{config.task.labels}."
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


def _choices(config: RecallConfig, results: Results) -> RecordTable:
    """Tabulate the loss at the edge of training, and the ends of both panels."""
    ends = {f"n_f = {config.longest}": ("distractor_writes", config.longest),
            f"ρ = {config.largest}": ("overlap", config.largest)}  # fmt: skip
    columns: dict[str, tuple[str, ...]] = {
        f"cross-entropy, n_f = {config.edge}": ("distractor_writes", config.edge, "cross_entropy")
    }
    columns |= {
        f"{word}, {end}": (*path, name)
        for end, path in ends.items()
        for word, name in zip(("accuracy", "pairwise", "full"), METRICS, strict=True)
    }
    return results.of_choices(config.choices, columns)


def _lengths(config: RecallConfig, results: Results) -> RecordTable:
    columns = {
        f"n_f = {config.longest}": ("distractor_writes", config.longest, "pairwise_margin"),
        f"ρ = {config.largest}": ("overlap", config.largest, "pairwise_margin"),
    }
    steps = sorted({*config.milestones, config.train.steps})
    return results.of_lengths(config.compared, steps, columns, "pairwise margin")


def notes(config: RecallConfig, results: Results) -> list[str]:
    """Explain the results, from the numbers."""
    end, far = ("distractor_writes", config.longest), ("overlap", config.largest)
    remarks = [
        "Query tokens do not write here unless a row says so: they carry no value, and their write key is zero. Time "
        "passes at them as at all tokens, so that GLA-style memories go on fading while they are asked.",
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
        remarks.append(
            f"The reset with ℓ² fixed at 0.05 has a gain of one half for ever and is up to {fixed:.3f} from "
            f"DeltaNet-style; with a learned ℓ² it is the same update in other letters, up to {learned:.3f} from it."
        )
    choices = {choice.key: choice for choice in config.choices}
    if "bayesian_layer_from_069" in choices:
        choice = choices["bayesian_layer_from_069"]
        loss = results.compared(choice, "distractor_writes", config.edge, "cross_entropy")
        remarks.append(
            f"Where ℓ² starts: from 0.05 and from 0.69 the Bayesian Layer has cross-entropies of {loss[0].mean:.4f} "
            f"and {loss[1].mean:.4f} at the edge of the training range, and pairwise margins of "
            f"{results.moves(choice, *end, 'pairwise_margin')} at n_f = {config.longest}, "
            f"{results.moves(choice, *far, 'pairwise_margin')} at ρ = {config.largest}."
        )
    writing = [choice for choice in config.choices if choice.query_writes]
    if writing:
        changes = (f"{UPDATES[c.default].title} {results.moves(c, *far, 'pairwise_margin')}" for c in writing)
        remarks.append(f"If query tokens write, pairwise margins at ρ = {config.largest} change: {'; '.join(changes)}.")
    return remarks
