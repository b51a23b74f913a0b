"""Build the tables and notes of a report on MQAR."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments.mqar import paper
from membydesign.experiments.mqar.config import PAPER
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.experiments.mqar.config import MQARConfig, Task
    from membydesign.experiments.mqar.results import Entry

NOTHING = "—"
ENOUGH = 100
"""The fewest queries of which an accuracy by rewrites is shown."""

STILL_RISING = 1.0
"""Points of validation accuracy over the last fifth of training, above which a model had not finished learning."""


def tables(config: MQARConfig, entries: Sequence[Entry]) -> list[RecordTable]:
    """Build all tables of a variant."""
    several = len(config.task.widths) > 1
    names = [f"{entry['title']}, width {entry['width']}" if several else entry["title"] for entry in entries]
    made = [_by_pairs(names, entries), _learning_rates(config, names, entries), _sizes(names, entries)]
    if any(kind.updates for kind in config.task.kinds):
        made.insert(1, _by_rewrites(config, names, entries))
    return made


def _percent(measured: dict[str, float] | None) -> str:
    return NOTHING if measured is None else f"{100 * measured['accuracy']:.1f}"


def _by_pairs(names: Sequence[str], entries: Sequence[Entry]) -> RecordTable:
    tested = [entry for entry in entries if entry["test"] is not None]
    pairs = list(tested[0]["test"]["by_pairs"]) if tested else []
    rows = []
    for name, entry in zip(names, entries, strict=True):
        test = entry["test"] or {"by_pairs": dict.fromkeys(pairs), "cross_entropy": None}
        loss = NOTHING if entry["test"] is None else f"{test['cross_entropy']:.3f}"
        rows.append([name, *(_percent(test["by_pairs"][D]) for D in pairs), _percent(entry["test"]), loss])
    note = ""
    if tested and len(tested[0]["accuracy_by_seed"]) > 1:
        spread = (f"{e['title']} {', '.join(f'{100 * x:.1f}' for x in e['accuracy_by_seed'])}" for e in tested)
        note = f"Means over seeds. Of each seed: {'; '.join(spread)}."
    headings = ["model", *(f"D = {D}" for D in pairs), "all queries", "cross-entropy (nats)"]
    return RecordTable("Test accuracy by number of pairs D (%)", headings, rows, note)


def _by_rewrites(config: MQARConfig, names: Sequence[str], entries: Sequence[Entry]) -> RecordTable:
    most = str(max(kind.pairs for kind in config.task.kinds))
    tested = [entry["test"] for entry in entries if entry["test"] is not None]
    every = tested[0]["by_pairs"][most]["by_rewrites"] if tested else {}
    counts = {n: measured["queries"] for n, measured in every.items() if measured["queries"] >= ENOUGH}
    rows = []
    for name, entry in zip(names, entries, strict=True):
        test: dict[str, Any] = entry["test"] or {"untouched": None, "updated": None}
        times = {} if entry["test"] is None else test["by_pairs"][most]["by_rewrites"]
        rows.append(
            [name, _percent(test["untouched"]), _percent(test["updated"]), *(_percent(times.get(n)) for n in counts)]
        )
    counted = ", ".join(f"{n}: {queries:,}" for n, queries in counts.items())
    headings = ["model", "all untouched keys", "all updated keys", *(f"D = {most}, rewrites: {n}" for n in counts)]
    note = f"Queries at D = {most} by rewrites of their key, where there are {ENOUGH} or more: {counted}."
    title = "Test accuracy of keys that were rewritten, and of those that were not (%)"
    return RecordTable(title, headings, rows, note if counts else "")


def _learning_rates(config: MQARConfig, names: Sequence[str], entries: Sequence[Entry]) -> RecordTable:
    rates = [f"{rate:g}" for rate in config.task.learning_rates]
    rows = []
    for name, entry in zip(names, entries, strict=True):
        tried = {rate: "diverged" if cell is None else _percent(cell) for rate, cell in entry["validation"].items()}
        rate = entry["learning_rate"]
        rows.append([name, *(tried.get(r, "not tried") for r in rates), NOTHING if rate is None else f"{rate:g}"])
    notes = [f"Means over {config.seeds} seeds."] if config.seeds > 1 else []
    if not config.whole_grid:
        notes.append(
            "Learning rates were tried from the largest on, and no further once a smaller one was worse or "
            f"{paper.NEAR_PERFECT:g} % were reached."
        )
    headings = ["model", *rates, "chosen"]
    return RecordTable("Validation accuracy by learning rate (%)", headings, rows, " ".join(notes))


def _sizes(names: Sequence[str], entries: Sequence[Entry]) -> RecordTable:
    headings = ["model", "weights", "mean", "covariance", "both", "convolution", "steps", "training tokens"]
    rows = []
    for name, entry in zip(names, entries, strict=True):
        size = entry["state"] or {}
        state = [f"{size[key]:,}" if size else "grows" for key in ("mean", "covariance", "recurrent", "convolution")]
        seconds = NOTHING if entry["seconds"] is None else f"{entry['seconds']:,.0f}"
        cost = [f"{entry['steps']:,}", f"{entry['tokens']:,}", seconds, f"{entry['seconds_of_all']:,.0f}"]
        rows.append([name, f"{entry['parameters']:,}", *state, *cost])
    note = (
        "Mean, covariance and convolution are numbers that one layer keeps between two tokens. Seconds of training, of "
        "one run with the chosen learning rate and of all runs, on whatever else the machine was doing."
    )
    return RecordTable("Sizes and cost", [*headings, "seconds", "seconds of all runs"], rows, note)


def notes(config: MQARConfig, entries: Sequence[Entry]) -> list[str]:
    """Return what a reader should know before believing the tables."""
    made = [_budget(config), *_differences(config), *_unfinished(entries), *_at_the_edge(config, entries)]
    lost = [f"{e['title']} at {rate}" for e in entries for rate, seeds in e["diverged"].items() if seeds]
    if lost:
        made.append(f"Diverged, and not chosen: {'; '.join(lost)}.")
    made.append(_choices(config))
    return [*made, *paper.NOTES[config.variant]]


def _budget(config: MQARConfig) -> str:
    ours = config.epochs * config.task.train_examples
    theirs = paper.EPOCHS * paper.TRAIN_EXAMPLES[config.variant]
    seen = f"{config.epochs} epochs of {config.task.train_examples:,} sequences, in {config.steps:,} steps"
    if ours >= theirs:
        return f"Every model was trained as long as in the paper: {seen}."
    return (
        f"Every model saw {100 * ours / theirs:.2g} % of the paper's training: {seen}, instead of {paper.EPOCHS} "
        f"epochs of {paper.TRAIN_EXAMPLES[config.variant]:,}. Where a model falls short of the paper, too little "
        "training may be the reason, and orders may change with more of it."
    )


def _differences(config: MQARConfig) -> list[str]:
    """List settings that differ from the paper's in a sentence; empty if none does."""
    theirs: Task = getattr(PAPER, config.variant)
    vocabulary = config.task.kinds[0].vocab_size
    warmup = "a tenth of the steps" if config.warmup is None else f"{config.warmup:,} steps"
    pairs = {
        f"batches of {config.batch_size}, not {paper.BATCH_SIZE}": config.batch_size != paper.BATCH_SIZE,
        f"a warm-up of {warmup}, not {paper.WARMUP:,} steps": config.warmup != paper.WARMUP,
        f"{_shapes(config.task)}, not {_shapes(theirs)}": config.variant != "base"
        and config.task.kinds != theirs.kinds,
        f"a vocabulary of {vocabulary:,}, not {paper.VOCABULARY:,}": vocabulary != paper.VOCABULARY,
        "smaller learning rates were not tried once they did worse": not config.whole_grid,
        f"heads of {config.head_dim}, not {paper.HEAD_DIM}": config.head_dim != paper.HEAD_DIM,
        f"no model of width {paper.WIDTH}": paper.WIDTH not in config.task.widths,
        f"learning rates {', '.join(f'{r:g}' for r in config.task.learning_rates)}": config.task.learning_rates
        != paper.LEARNING_RATES[config.variant],
    }
    differ = [words for words, different in pairs.items() if different]
    return [f"Unlike the paper: {'; '.join(differ)}."] if differ else []


def _shapes(task: Task) -> str:
    pairs: dict[int, set[int]] = {}
    for kind in task.kinds:
        pairs.setdefault(kind.length, set()).add(kind.pairs)
    return " and ".join(f"L = {L} with D = {', '.join(map(str, sorted(D)))}" for L, D in pairs.items())


def _unfinished(entries: Sequence[Entry]) -> list[str]:
    rising = []
    for entry in entries:
        curve = entry["curve"] or []
        if len(curve) > 2:
            points = 100 * (curve[-1]["accuracy"] - curve[-3]["accuracy"])
            if points > STILL_RISING:
                rising.append(f"{entry['title']} (width {entry['width']}, by {points:.1f} points)")
    if not rising:
        return []
    return [f"Validation accuracy still rose over the last fifth of training: {'; '.join(rising)}."]


def _at_the_edge(config: MQARConfig, entries: Sequence[Entry]) -> list[str]:
    rates = config.task.learning_rates
    if len(rates) < 3:
        return []
    ends = {min(rates): "lowest", max(rates): "highest"}
    there = [
        f"{e['title']} (width {e['width']}, the {ends[e['learning_rate']]})"
        for e in entries
        if e["learning_rate"] in ends and 100 * e["test"]["accuracy"] < paper.NEAR_PERFECT
    ]
    if not there:
        return []
    return [f"Chosen at an edge of the grid, so that a better learning rate may lie beyond: {'; '.join(there)}."]


def _choices(config: MQARConfig) -> str:
    readout = "shares the weights of the embedding" if config.tied else "has weights of its own"
    repeated = "One run for each, as in the paper" if config.seeds == 1 else f"{config.seeds} seeds"
    return (
        f"{repeated}; learning rates were chosen on {config.validation_examples:,} validation sequences, and the "
        f"tests are {config.test_examples:,} others. The paper says neither how many there are, nor how weights "
        f"start: in all models, embeddings start with standard deviation {config.embedding_range:g} and linear maps "
        f"with 2/√width, and the readout {readout}. These starts, and the SiLU behind a convolution of width 1 (which "
        "mixes no tokens) that the Bayesian Layer has here, were chosen by hand in short trials of the Bayesian Layer, "
        "not of the others: results/mqar/NOTES.md. Gradients are not clipped, since the paper mentions no clipping for "
        "MQAR."
    )
