"""Language models from scratch: does a propagated covariance help where only a memory can know the next token?

Three models with the same recurrent state are trained on the same windows of text. Their perplexity is measured on all
held-out tokens, and apart on AR-hits, tokens that complete a rare pair seen before in the window, by distance. The
paper: §4.3 and its appendix on WikiText-103.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from membydesign.experiments.record import Bound, Outcome, RecordTable, highest, lowest
from membydesign.experiments.texts import prepare, prepared
from membydesign.experiments.wikitext_figures import plot
from membydesign.experiments.wikitext_models import ARMS
from membydesign.experiments.wikitext_runs import work
from membydesign.experiments.wikitext_settings import PAPER, PRESETS, WikitextConfig
from membydesign.training import Run, processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from membydesign.experiments.record import Check
    from membydesign.experiments.workspace import Workspace

__all__ = ["PRESETS", "TITLE", "WikitextConfig", "plot", "run"]

TITLE = "Language models from scratch: perplexity where only a memory knows"

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
"""The paper's table, in the order of the slices. Perplexities of another tokenizer, corpus and size do not compare."""


def run(config: WikitextConfig, workspace: Workspace) -> Outcome:
    """Choose a learning rate, train every model with every seed, and measure them on the same tokens."""
    with processes().main_process_first():  # the others find everything made
        folder = prepare(config.texts, workspace)
    probes = config.probes()
    workspace.stage("learning rate")
    tried = workspace.sweep([Run(each.name, each, work) for each in probes]) if probes else {}
    rate = (
        min(tried.values(), key=lambda m: m["validation"]["loss"])["learning_rate"]
        if tried
        else config.learning_rates[0]
    )
    runs = config.runs(rate)
    workspace.stage("training")
    found = workspace.sweep([Run(each.name, each, work) for each in runs])
    perplexity = {
        arm: {s: _spread([found[r.name]["held_out"][s]["perplexity"] for r in runs if r.arm == arm]) for s in SLICES}
        for arm in config.arms
    }
    metrics = {
        "learning_rate": rate,
        "perplexity": perplexity,
        "text": _text(folder),
        "runs": {**tried, **found},
    }
    made = list(found.values())
    tables = [_perplexities(perplexity, made), *_rates(tried, rate), _cost(config, made)]
    return Outcome(config, _claims(config, perplexity), metrics, _notes(config, metrics, made), perplexity, tables)


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


def _claims(config: WikitextConfig, perplexity: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """The paper's orders; none of its numbers, which are of its own tokenizer, corpus and size."""
    if not {"bayesian_layer", "gated_deltanet", "mamba2"} <= set(config.arms):
        return []
    at = {
        s: {ARMS[arm]: found[s]["mean"] for arm, found in perplexity.items()}
        for s in SLICES
        if all(found[s] is not None for found in perplexity.values())
    }
    claims: list[Check] = []
    for name, values in at.items():
        if name.startswith("hit"):
            claim = "The Bayesian Layer has the lowest perplexity on AR-hits, at every distance"
            claims.append(lowest(claim, f"perplexity, {SLICES[name]}", ARMS["bayesian_layer"], values))
    if "hit" in at:
        claim = "Mamba-2 performs poorly on AR-hits"
        claims.append(highest(claim, "perplexity, AR-hits", ARMS["mamba2"], at["hit"]))
    for name in ("overall", "other"):
        claim = "Gated DeltaNet has the lowest perplexity overall and on other tokens, and the others are comparable"
        claims.append(lowest(claim, f"perplexity, {SLICES[name]}", ARMS["gated_deltanet"], at[name]))
        for arm in ("bayesian_layer", "mamba2"):
            ratio = at[name][ARMS[arm]] / at[name][ARMS["gated_deltanet"]]
            claims.append(Bound(claim, f"{ARMS[arm]} / Gated DeltaNet, {SLICES[name]} (our reading)", "≤ 1.15", ratio))
    return claims


def _perplexities(perplexity: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> RecordTable:
    rows = []
    for arm, found in perplexity.items():
        cells = ["—" if x is None else f"{x['mean']:.2f} ± {x['std']:.2f}" for x in found.values()]
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


def _notes(config: WikitextConfig, metrics: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    text, tokens = metrics["text"], runs[0]["tokens"]
    theirs = PAPER.steps * PAPER.tokens_per_step
    notes = [
        f"Trained on {tokens:,} tokens ({runs[0]['steps']:,} steps of {config.tokens_per_step:,}) of a text of "
        f"{text['training_tokens']:,}, {100 * tokens / theirs:.2g} % of the paper's {theirs:,}, with a vocabulary of "
        f"{text['vocabulary']:,}. All models of a seed see the same windows.",
        "The Bayesian Layer has the short convolutions that Gated DeltaNet has, so that they differ in their memory, "
        "and a decay for each row; the paper does not say whether its own had convolutions, nor whether it had decays "
        "or damped rotations.",
    ]
    hits = runs[0]["held_out"]["hit"]["tokens"]
    if hits < 1000:
        notes.append(f"Only {hits:,} held-out tokens are AR-hits: their perplexities are rough.")
    return notes
