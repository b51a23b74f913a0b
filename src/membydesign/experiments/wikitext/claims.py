"""Compare the paper's claims about models from scratch with our results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from membydesign.experiments.wikitext.models import ARMS
from membydesign.reports.comparison import Bound, highest, lowest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.experiments.wikitext.config import WikitextConfig
    from membydesign.reports.comparison import Check

SLICES = {
    "overall": "all tokens",
    "hit": "AR-hits",
    "other": "other tokens",
    "hit 1–64": "AR-hits, 1–64",
    "hit 65–256": "AR-hits, 65–256",
    "hit 257–1,024": "AR-hits, 257–1,024",
}
"""Slices of the held-out tokens, as `membydesign.evaluation.ar_hits` names them, and as tables do."""

PAPER_PERPLEXITY = {
    "bayesian_layer": (20.01, 18.15, 20.03, 7.21, 13.91, 92.1),
    "gated_deltanet": (18.75, 23.72, 18.69, 10.09, 19.57, 99.9),
    "mamba2": (21.36, 424.8, 20.58, 380.6, 398.9, 544.5),
}
"""The paper's table, in the order of the slices; not comparable across tokenizers, corpora and model sizes."""


def recalls(perplexity: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a model recalls: whether it predicts AR-hits, whose pairs are rare, as well as other tokens."""
    return any(
        slices["hit"] is not None and slices["hit"]["mean"] <= slices["other"]["mean"] for slices in perplexity.values()
    )


def claims(config: WikitextConfig, perplexity: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Compare the paper's orders, but not its numbers, which depend on its tokenizer, corpus and model size.

    Orders on AR-hits are tested only if a model recalls: see `recalls`.
    """
    if not {"bayesian_layer", "gated_deltanet", "mamba2"} <= set(config.arms):
        return []
    at = {
        s: {ARMS[arm]: slices[s]["mean"] for arm, slices in perplexity.items()}
        for s in SLICES
        if all(slices[s] is not None for slices in perplexity.values())
    }
    on_hits: list[Check] = []
    for name, values in at.items():
        if name.startswith("hit"):
            claim = "The Bayesian Layer has the lowest perplexity on AR-hits, at every distance"
            on_hits.append(lowest(claim, f"perplexity, {SLICES[name]}", ARMS["bayesian_layer"], values))
    if "hit" in at:
        claim = "Mamba-2 performs poorly on AR-hits"
        on_hits.append(highest(claim, "perplexity, AR-hits", ARMS["mamba2"], at["hit"]))
    checks = [replace(check, tested=recalls(perplexity)) for check in on_hits]
    for name in ("overall", "other"):
        claim = "Gated DeltaNet has the lowest perplexity overall and on other tokens, and the others are comparable"
        checks.append(lowest(claim, f"perplexity, {SLICES[name]}", ARMS["gated_deltanet"], at[name]))
        for arm in ("bayesian_layer", "mamba2"):
            ratio = at[name][ARMS[arm]] / at[name][ARMS["gated_deltanet"]]
            checks.append(Bound(claim, f"{ARMS[arm]} / Gated DeltaNet, {SLICES[name]} (our reading)", "≤ 1.15", ratio))
    return checks
