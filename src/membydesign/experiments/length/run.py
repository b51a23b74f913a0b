"""Run the length study: which memories go on working far beyond the length that they were trained at?"""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from membydesign.experiments.length.config import PLACEMENTS, PRESETS, LengthConfig
from membydesign.experiments.length.figures import plot
from membydesign.reports.record import Outcome, RecordTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.experiments.shared.run_context import RunContext

__all__ = ["PRESETS", "TITLE", "LengthConfig", "lacks", "plot", "run"]

TITLE = "Beyond the training length: gains and recall with free and with stationary drift"


def run(config: LengthConfig, context: RunContext) -> Outcome:
    """Train every design with every seed, and measure it at every length."""
    context.stage("training")
    metrics = context.sweep(config.runs())
    found, untrained = (_of_designs(config, metrics, kind) for kind in ("", "untrained-"))
    tables = [
        *(_recall(config, found, placement) for placement in PLACEMENTS),
        _gains(config, untrained, "new layers"),
        _gains(config, found, "trained layers"),
        _training(found),
    ]
    results = {"designs": found, "untrained": untrained}
    return Outcome(config, [], results, _notes(config), results, tables)


def _of_designs(
    config: LengthConfig, metrics: Mapping[str, dict[str, Any]], kind: str
) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of the finished runs of a kind by design, one per seed."""
    every = {n: [metrics.get(f"{n}-{kind}seed{seed}") for seed in range(config.seeds)] for n in config.names}
    return {name: done for name, runs in every.items() if (done := [each for each in runs if each is not None])}


def lacks(config: LengthConfig, metrics: Mapping[str, Any]) -> bool:
    """Return whether results lack a run, such as those of designs that were added to the catalogue since."""
    kinds = ("designs", "untrained")
    return any(len(metrics[kind].get(name, ())) < config.seeds for kind in kinds for name in config.names)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _recall(config: LengthConfig, found: Mapping[str, list[dict[str, Any]]], placement: str) -> RecordTable:
    rows = [
        [name, *(_spread([each["recall"][placement][str(n)] for each in runs]) for n in config.times)]
        for name, runs in found.items()
    ]
    note = {
        "anywhere": "Pairs are anywhere in the sequence, so most are far from the queries in long ones.",
        "recent": "Pairs are among the last tokens, as far from the queries as in training: only the position differs.",
    }[placement]
    guess = f" A guess has {1 / config.task.values:.3f}."
    return RecordTable(f"Recall, pairs {placement}", ["design", *_lengths(config)], rows, note + guess)


def _gains(config: LengthConfig, found: Mapping[str, list[dict[str, Any]]], which: str) -> RecordTable:
    rows = [
        [name, *(_spread([each["gains"][str(n)]["distance"] for each in runs]) for n in config.times)]
        for name, runs in found.items()
    ]
    note = (
        "Largest difference of the distribution function of gains from that at the training length (Kolmogorov, "
        "0: the same, 1: disjoint), at new pairs of sequences whose pairs are recent."
    )
    return RecordTable(f"Gains of {which}: distance from training", ["design", *_lengths(config)], rows, note)


def _lengths(config: LengthConfig) -> list[str]:
    return [f"{times} × {config.length}" for times in config.times]


def _training(found: Mapping[str, list[dict[str, Any]]]) -> RecordTable:
    rows = [
        [
            name,
            runs[0]["parameters"],
            len(runs),
            _spread([each["training_loss"] for each in runs]),
            round(mean(each["seconds"] for each in runs)),
        ]
        for name, runs in found.items()
    ]
    commits = ", ".join(sorted({each["commit"][:12] for runs in found.values() for each in runs}))
    note = f"Seconds on a machine that did other work too. Runs were made by commits {commits}."
    return RecordTable("Training", ["design", "parameters", "seeds", "training loss", "seconds per run"], rows, note)


def _notes(config: LengthConfig) -> list[str]:
    task = config.task
    return [
        f"{task.pairs} pairs of a key and a value among random fillers, then {task.pairs} queries; "
        f"{task.keys} keys, {task.values} values, {task.fillers} fillers. Models have width 64, two heads of "
        f"D = 32 and {config.layers} layer{'s' if config.layers > 1 else ''}; training has {config.length} tokens.",
        "A gain is the share of the error along a key that its write corrects, β_t k_tᵀu_t, pooled over layers, heads "
        "and new pairs: values of keys that were not written before.",
    ]
