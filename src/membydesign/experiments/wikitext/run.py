"""Train language models from scratch: does a covariance help where only a memory can know the next token?

Three models with the same recurrent state are trained on the same windows of text. Their perplexity is measured on all
held-out tokens, and separately on AR-hits, tokens that complete a rare pair seen before in the window, by distance. The
paper: §4.3 and its appendix on WikiText-103.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from membydesign.experiments.shared.texts import prepare, prepared
from membydesign.experiments.wikitext.claims import SLICES, claims
from membydesign.experiments.wikitext.config import PRESETS, WikitextConfig
from membydesign.experiments.wikitext.figures import plot
from membydesign.experiments.wikitext.tables import notes, tables
from membydesign.experiments.wikitext.training import work
from membydesign.reports.record import Outcome
from membydesign.training import Run, processes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from membydesign.experiments.shared.run_context import RunContext

__all__ = ["PRESETS", "TITLE", "WikitextConfig", "plot", "run"]

TITLE = "Language models from scratch: perplexity where only a memory knows"


def run(config: WikitextConfig, context: RunContext) -> Outcome:
    """Choose a learning rate, train every model with every seed, and measure them on the same tokens."""
    with processes().main_process_first():  # the other processes find all files in place
        folder = prepare(config.texts, context)
    probes = config.probes()
    context.stage("learning rate")
    tried = context.sweep([Run(each.name, each, work) for each in probes]) if probes else {}
    rate = (
        min(tried.values(), key=lambda m: m["validation"]["loss"])["learning_rate"]
        if tried
        else config.learning_rates[0]
    )
    runs = config.runs(rate)
    context.stage("training")
    trained = context.sweep([Run(each.name, each, work) for each in runs])
    perplexity = {
        arm: {s: _spread([trained[r.name]["held_out"][s]["perplexity"] for r in runs if r.arm == arm]) for s in SLICES}
        for arm in config.arms
    }
    metrics = {
        "learning_rate": rate,
        "perplexity": perplexity,
        "text": _text(folder),
        "runs": {**tried, **trained},
    }
    done = list(trained.values())
    return Outcome(
        config,
        claims(config, perplexity),
        metrics,
        notes(config, metrics, done),
        perplexity,
        tables(config, perplexity, tried, rate, done),
        training_share=config.share_of_paper,
    )


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    kept = [x for x in values if x is not None]
    if not kept:
        return None
    return {"mean": mean(kept), "std": stdev(kept) if len(kept) > 1 else 0.0}


def _text(folder: Path) -> dict[str, Any]:
    files = prepared(folder)
    return {
        "vocabulary": files.train.vocab_size,
        "training_tokens": len(files.train),
        "held_out_tokens": len(files.held_out),
        "pairs": len(files.bigrams),
    }
