"""Build the tables and notes of the from-scratch comparison."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from membydesign.experiments.wikitext.claims import PAPER_PERPLEXITY, SLICES, recalls
from membydesign.experiments.wikitext.config import PAPER
from membydesign.experiments.wikitext.models import ARMS
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.experiments.wikitext.config import WikitextConfig


def tables(
    config: WikitextConfig,
    perplexity: Mapping[str, Mapping[str, Any]],
    probes: Mapping[str, Mapping[str, Any]],
    learning_rate: float,
    runs: Sequence[Mapping[str, Any]],
) -> list[RecordTable]:
    """Build all tables: perplexity, learning rates, and sizes and cost."""
    return [_perplexities(perplexity, runs), *_rates(probes, learning_rate), _cost(config, runs)]


def _perplexities(perplexity: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> RecordTable:
    rows = []
    for arm, slices in perplexity.items():
        cells = ["—" if x is None else f"{x['mean']:.2f} ± {x['std']:.2f}" for x in slices.values()]
        rows.append([ARMS[arm], *cells])
    rows += [[f"{ARMS[arm]}, the paper", *(f"{x:g}" for x in PAPER_PERPLEXITY[arm])] for arm in perplexity]
    counts = ", ".join(f"{label} {runs[0]['held_out'][s]['tokens']:,}" for s, label in SLICES.items())
    note = (
        f"Mean ± standard deviation over seeds. Tokens: {counts}; the same for all models. The paper's rows are of its "
        "own tokenizer, corpus and model size: orders may be compared, numbers may not."
    )
    return RecordTable("Held-out perplexity", ["model", *SLICES.values()], rows, note)


def _rates(tried: Mapping[str, Mapping[str, Any]], rate: float) -> list[RecordTable]:
    if not tried:
        return []
    rows = [[f"{m['learning_rate']:g}", f"{m['validation']['loss']:.4f}", m["steps"]] for m in tried.values()]
    note = f"Gated DeltaNet; {rate:g} was taken for all models, as in the paper."
    return [RecordTable("Validation loss by learning rate", ["learning rate", "loss (nats)", "steps"], rows, note)]


def _cost(config: WikitextConfig, runs: Sequence[Mapping[str, Any]]) -> RecordTable:
    rows = []
    for arm in config.arms:
        mine = [m for m in runs if m["arm"] == arm]
        validation = mean(m["validation"]["loss"] for m in mine)
        size = [f"{mine[0]['weights_beside_embedding']:,}", f"{mine[0]['recurrent_state']:,}"]
        cost = [f"{mine[0]['steps']:,}", f"{mine[0]['tokens']:,}", f"{mean(m['seconds'] for m in mine):,.0f}"]
        rows.append([ARMS[arm], *size, *cost, f"{mean(m['training_loss'] for m in mine):.3f}", f"{validation:.3f}"])
    headings = ["model", "weights beside the embedding", "recurrent state", "steps", "tokens", "seconds"]
    note = "Recurrent state: numbers kept between two tokens, of all layers. Seconds of training of one run."
    return RecordTable("Sizes and cost", [*headings, "training loss", "validation loss"], rows, note)


def notes(config: WikitextConfig, metrics: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a reader should know before believing the tables."""
    text, tokens = metrics["text"], runs[0]["tokens"]
    theirs = PAPER.steps * PAPER.tokens_per_step
    remarks = [
        f"Trained on {tokens:,} tokens ({runs[0]['steps']:,} steps of {config.tokens_per_step:,}) of a text of "
        f"{text['training_tokens']:,}, {100 * tokens / theirs:.2g} % of the paper's {theirs:,}, with a vocabulary of "
        f"{text['vocabulary']:,}. All models of a seed see the same windows.",
        "The Bayesian Layer has the short convolutions that Gated DeltaNet has, so that they differ in their memory, "
        "and a decay for each row; the paper does not say whether its own had convolutions, nor whether it had decays "
        "or damped rotations.",
    ]
    if not recalls(metrics["perplexity"]):
        remarks.append(
            "No model recalls yet: each predicts AR-hits worse than other tokens. The order on AR-hits therefore says "
            "nothing about memories, and is not counted as a test of the paper's claims."
        )
    hits = runs[0]["held_out"]["hit"]["tokens"]
    if hits < 1000:
        remarks.append(f"Only {hits:,} held-out tokens are AR-hits: their perplexities are rough.")
    return remarks
