"""What the runs of MQAR came to: learning rates chosen by validation, their tests, and the paper's claims beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.experiments import mqar_paper as paper
from membydesign.experiments.mqar_models import ARMS
from membydesign.experiments.mqar_settings import PAPER
from membydesign.experiments.record import About, Bound, highest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.experiments.mqar_settings import MQARConfig
    from membydesign.experiments.record import Check

    Metrics = dict[str, Any]
    """Of one run."""

    Entry = dict[str, Any]
    """Of one arm at one width: see `entries`."""


def entries(runs: Sequence[Metrics]) -> list[Entry]:
    """One entry for every arm and width, in the order of the runs.

    An entry has "learning_rate", the chosen one; "validation", what it was chosen by, for every learning rate tried
    (None if it diverged); "test" and "curve" of the chosen one, means over seeds; "accuracy_by_seed"; sizes; and
    "seconds" of training, of one run of the chosen one, and "seconds_of_all" learning rates and seeds. If every
    learning rate diverged, "learning_rate" and "test" are None.
    """
    return [_entry(arm, width, rates) for (arm, width), rates in by_learning_rate(runs).items()]


def by_learning_rate(runs: Sequence[Metrics]) -> dict[tuple[str, int], dict[float, list[Metrics]]]:
    """Runs of every arm and width, by learning rate."""
    grouped: dict[tuple[str, int], dict[float, list[Metrics]]] = {}
    for run in runs:
        grouped.setdefault((run["arm"], run["width"]), {}).setdefault(run["learning_rate"], []).append(run)
    return grouped


def _entry(arm: str, width: int, rates: dict[float, list[Metrics]]) -> Entry:
    rate = choose(rates)
    every = [run for seeds in rates.values() for run in seeds]
    kept = [] if rate is None else converged(rates[rate])
    of_chosen = {key: mean([run[key] for run in kept]) if kept else None for key in ("test", "curve", "seconds")}
    return {
        "arm": arm,
        "title": ARMS[arm].title,
        "width": width,
        "learning_rate": rate,
        "validation": {f"{each:g}": _validation(seeds) for each, seeds in rates.items()},
        "diverged": {f"{each:g}": len(seeds) - len(converged(seeds)) for each, seeds in rates.items()},
        **of_chosen,
        "accuracy_by_seed": [run["test"]["accuracy"] for run in kept],
        "seconds_of_all": sum(run["seconds"] for run in every),
        **{key: (kept or every)[0][key] for key in ("parameters", "state", "steps", "tokens")},
    }


def choose(rates: Mapping[float, Sequence[Metrics]]) -> float | None:
    """The learning rate with the best validation accuracy, of those that diverged for the fewest seeds.

    Accuracies are means over seeds. Of equal ones the lower cross-entropy decides. None if all runs diverged.

    Args:
        rates: the runs of every learning rate, one for each seed.
    """

    def merit(rate: float) -> tuple[int, float, float]:
        found = _validation(rates[rate]) or {"accuracy": 0.0, "cross_entropy": 0.0}
        return len(converged(rates[rate])), found["accuracy"], -found["cross_entropy"]

    best = max(rates, key=merit)
    return best if converged(rates[best]) else None


def converged(runs: Sequence[Metrics]) -> list[Metrics]:
    """The runs that did not diverge."""
    return [run for run in runs if run["diverged"] is None]


def _validation(runs: Sequence[Metrics]) -> dict[str, float] | None:
    kept = converged(runs)
    return mean([run["validation"] for run in kept]) if kept else None


def mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, and of dictionaries and lists of one form, number by number."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean(each) for each in zip(*values, strict=True)]
    if first is None or all(value == first for value in values):
        return first
    return sum(values) / len(values)


def accuracies(found: Sequence[Entry], width: int) -> dict[str, float]:
    """Test accuracy in per cent, by arm, at one width; without arms that diverged."""
    return {e["arm"]: 100 * e["test"]["accuracy"] for e in found if e["width"] == width and e["test"] is not None}


def widest(found: Sequence[Entry]) -> int:
    """The largest width that was run."""
    return max(entry["width"] for entry in found)


def compare(config: MQARConfig, found: Sequence[Entry]) -> tuple[list[Check], list[str]]:
    """The paper's claims about a variant beside ours, and what could not be compared."""
    variant, width = config.variant, widest(found)
    checks = {"base": _base, "update": _update, "block": _block}[variant](found)
    if variant == "update" and config.task.kinds == PAPER.update.kinds:
        checks = [*_update_numbers(found), *checks]
    needed = {
        "base": ("bayesian_layer",),
        "update": ("bayesian_layer", "gated_deltanet", "mamba2"),
        "block": ("bayesian_layer", "gated_deltanet_no_conv"),
    }[variant]
    missing = [ARMS[arm].title for arm in needed if arm not in accuracies(found, width)]
    if not missing:
        return checks, []
    return checks, [f"Not compared with the paper, since not run or diverged: {', '.join(missing)}."]


def _base(found: Sequence[Entry]) -> list[Check]:
    widths = sorted({entry["width"] for entry in found})
    ours = accuracies(found, widths[-1])
    if "bayesian_layer" not in ours:
        return []
    claim = "Base MQAR: near-perfect recall at larger widths"
    bayesian = ours.pop("bayesian_layer")
    quantity = f"Bayesian Layer, accuracy at width {widths[-1]} (%; the threshold is our reading)"
    checks: list[Check] = [Bound(claim, quantity, f"≥ {paper.NEAR_PERFECT:g}", bayesian)]
    smallest = accuracies(found, widths[0])
    if len(widths) > 1 and "bayesian_layer" in smallest:
        quantity = f"Bayesian Layer, accuracy at width {widths[-1]} less that at width {widths[0]} (points)"
        checks.append(Bound(claim, quantity, "≥ 0", bayesian - smallest["bayesian_layer"]))
    if ours:
        best = max(ours, key=lambda arm: ours[arm])
        claim = "Base MQAR: the Bayesian Layer matches the best baselines"
        quantity = f"best baseline ({ARMS[best].title}, {ours[best]:.2f} %) less Bayesian Layer (points; our reading)"
        checks.append(Bound(claim, quantity, f"≤ {paper.COMPETITIVE:g}", ours[best] - bayesian))
    return checks


def _update(found: Sequence[Entry]) -> list[Check]:
    """The order, which any sequences can show."""
    ours = {arm: x for arm, x in accuracies(found, widest(found)).items() if arm in paper.UPDATE_ARMS}
    if "bayesian_layer" not in ours or len(ours) < 2:
        return []
    named = {ARMS[arm].title: x for arm, x in ours.items()}
    claim = "Update-MQAR: the Bayesian Layer is more accurate than Gated DeltaNet and Mamba-2"
    return [highest(claim, "accuracy (%)", "Bayesian Layer", named)]


def _update_numbers(found: Sequence[Entry]) -> list[Check]:
    """The numbers, which are of the paper's own sequences."""
    claim = "Update-MQAR: the Bayesian Layer holds at ≈ 88 % while Gated DeltaNet and Mamba-2 fall to ≈ 60 %"
    ours = {arm: x for arm, x in accuracies(found, widest(found)).items() if arm in paper.UPDATE_ARMS}
    checks: list[Check] = []
    for arm, accuracy in ours.items():
        quantity = f"{ARMS[arm].title}, accuracy (%)"
        if arm == "bayesian_layer":
            least = f"≥ {paper.UPDATE_BAYESIAN - paper.ABOUT:g}"
            checks.append(Bound(claim, f"{quantity}; our reading of ≈ 88", least, accuracy))
        else:
            checks.append(About(claim, quantity, paper.UPDATE_OTHERS, accuracy, paper.ABOUT))
    return checks


def _block(found: Sequence[Entry]) -> list[Check]:
    """Of the text, which speaks of the Bayesian Layer, and of the figure, which has Gated DeltaNet beside it."""
    bridged = {
        "bayesian_layer": "Block-MQAR: the Bayesian Layer bridges the key–value gap without local mixing",
        "gated_deltanet_no_conv": "Block-MQAR: Gated DeltaNet without its convolution bridges the gap too",
    }
    ours = accuracies(found, widest(found))
    return [
        Bound(claim, f"{ARMS[arm].title}, accuracy (%; our reading)", f"≥ {paper.BRIDGES:g}", ours[arm])
        for arm, claim in bridged.items()
        if arm in ours
    ]
