"""Compare the paper's claims about learned recall with our results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.experiments.recall.config import RecallRun
from membydesign.experiments.recall.tables import MARGINS, distance
from membydesign.experiments.shared.addressed import PAPER_UPDATES, UPDATES
from membydesign.reports.comparison import Bound, Comparison

if TYPE_CHECKING:
    from membydesign.experiments.recall.config import RecallConfig
    from membydesign.experiments.shared.addressed_sweep import Results
    from membydesign.reports.comparison import Check

STABLE = 0.05
"""By how much a margin may move and still count as the same: our reading of "stable", "plateau" and "tracks"."""


def claims(config: RecallConfig, results: Results, margin: str) -> list[Check]:
    """Compare what the paper says of panels (c) and (d), for one kind of margin."""
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
    checks: list[Check] = [
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
    checks.append(
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
            checks.append(Bound(track, "largest distance of two means", f"≤ {STABLE}", largest))
    return checks
