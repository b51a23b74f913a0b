"""Compare the paper's claims about MQAR with our results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.experiments.mqar import paper
from membydesign.experiments.mqar.config import PAPER
from membydesign.experiments.mqar.models import ARMS
from membydesign.experiments.mqar.results import accuracies, widest
from membydesign.reports.comparison import About, Bound, highest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.experiments.mqar.config import MQARConfig
    from membydesign.experiments.mqar.results import Entry
    from membydesign.reports.comparison import Check


def compare(config: MQARConfig, entries: Sequence[Entry]) -> tuple[list[Check], list[str]]:
    """Compare the paper's claims about a variant with ours; also return notes on what could not be compared."""
    variant, width = config.variant, widest(entries)
    checks = {"base": _base, "update": _update, "block": _block}[variant](entries)
    if variant == "update" and config.task.kinds == PAPER.update.kinds:
        checks = [*_update_numbers(entries), *checks]
    needed = {
        "base": ("bayesian_layer",),
        "update": ("bayesian_layer", "gated_deltanet", "mamba2"),
        "block": ("bayesian_layer", "gated_deltanet_no_conv"),
    }[variant]
    missing = [ARMS[arm].title for arm in needed if arm not in accuracies(entries, width)]
    if not missing:
        return checks, []
    return checks, [f"Not compared with the paper, since not run or diverged: {', '.join(missing)}."]


def _base(entries: Sequence[Entry]) -> list[Check]:
    widths = sorted({entry["width"] for entry in entries})
    ours = accuracies(entries, widths[-1])
    if "bayesian_layer" not in ours:
        return []
    claim = "Base MQAR: near-perfect recall at larger widths"
    all_widths = set(PAPER.base.widths) <= set(widths)  # one width says nothing about larger ones
    bayesian = ours.pop("bayesian_layer")
    quantity = f"Bayesian Layer, accuracy at width {widths[-1]} (%; the threshold is our reading)"
    checks: list[Check] = [Bound(claim, quantity, f"≥ {paper.NEAR_PERFECT:g}", bayesian, tested=all_widths)]
    smallest = accuracies(entries, widths[0])
    if len(widths) > 1 and "bayesian_layer" in smallest:
        quantity = f"Bayesian Layer, accuracy at width {widths[-1]} less that at width {widths[0]} (points)"
        checks.append(Bound(claim, quantity, "≥ 0", bayesian - smallest["bayesian_layer"], tested=all_widths))
    if ours:
        best = max(ours, key=lambda arm: ours[arm])
        claim = "Base MQAR: the Bayesian Layer matches the best baselines"
        quantity = f"best baseline ({ARMS[best].title}, {ours[best]:.2f} %) less Bayesian Layer (points; our reading)"
        checks.append(Bound(claim, quantity, f"≤ {paper.COMPETITIVE:g}", ours[best] - bayesian))
    return checks


def _update(entries: Sequence[Entry]) -> list[Check]:
    """Compare the order, which any sequences can show."""
    ours = {arm: x for arm, x in accuracies(entries, widest(entries)).items() if arm in paper.UPDATE_ARMS}
    if "bayesian_layer" not in ours or len(ours) < 2:
        return []
    named = {ARMS[arm].title: x for arm, x in ours.items()}
    claim = "Update-MQAR: the Bayesian Layer is more accurate than Gated DeltaNet and Mamba-2"
    return [highest(claim, "accuracy (%)", "Bayesian Layer", named)]


def _update_numbers(entries: Sequence[Entry]) -> list[Check]:
    """Compare the numbers, which hold for the paper's own sequences."""
    claim = "Update-MQAR: the Bayesian Layer holds at ≈ 88 % while Gated DeltaNet and Mamba-2 fall to ≈ 60 %"
    ours = {arm: x for arm, x in accuracies(entries, widest(entries)).items() if arm in paper.UPDATE_ARMS}
    checks: list[Check] = []
    for arm, accuracy in ours.items():
        quantity = f"{ARMS[arm].title}, accuracy (%)"
        if arm == "bayesian_layer":
            least = f"≥ {paper.UPDATE_BAYESIAN - paper.ABOUT:g}"
            checks.append(Bound(claim, f"{quantity}; our reading of ≈ 88", least, accuracy))
        else:
            checks.append(About(claim, quantity, paper.UPDATE_OTHERS, accuracy, paper.ABOUT))
    return checks


def _block(entries: Sequence[Entry]) -> list[Check]:
    """Compare a claim of the text, about the Bayesian Layer, and one of the figure, about Gated DeltaNet."""
    bridged = {
        "bayesian_layer": "Block-MQAR: the Bayesian Layer bridges the key–value gap without local mixing",
        "gated_deltanet_no_conv": "Block-MQAR: Gated DeltaNet without its convolution bridges the gap too",
    }
    ours = accuracies(entries, widest(entries))
    return [
        Bound(claim, f"{ARMS[arm].title}, accuracy (%; our reading)", f"≥ {paper.BRIDGES:g}", ours[arm])
        for arm, claim in bridged.items()
        if arm in ours
    ]
