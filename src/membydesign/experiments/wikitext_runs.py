"""One run of the from-scratch comparison: a language model trained on text and measured on AR-hits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from membydesign.data.windows import Windows
from membydesign.evaluation.ar_hits import ar_hits, slices
from membydesign.experiments.record import commit
from membydesign.experiments.texts import prepared
from membydesign.experiments.wikitext_models import configuration, make_model, recurrent_state, weights_beside_embedding
from membydesign.training import NextToken, all_losses, make_accelerator, train_in_stages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from membydesign.data.token_files import TokenFile
    from membydesign.training import Progress, TrainSettings
    from membydesign.training.processes import Precision


@dataclass(frozen=True)
class WikitextRun:
    """Settings of one run.

    Attributes:
        arm: a name of `ARMS`.
        seed: of weights, order of windows and dropout; models of one seed see the same tokens.
        train: optimiser and schedule; its batches are windows.
        window: L, tokens.
        layers: see `configuration`.
        num_heads: H.
        head_dim: D.
        dropout: of hidden units of MLPs.
        precision: "fp32" or "bf16".
        rows_at_a_time: windows of each process at a time; None for all of its share.
        held_out_windows: on how many the model is measured; None for all.
        probe: whether it is run to choose a learning rate: measured on validation windows, and not on held-out ones.
    """

    arm: str
    seed: int
    train: TrainSettings
    window: int
    layers: int
    num_heads: int
    head_dim: int
    dropout: float
    precision: Precision = "fp32"
    rows_at_a_time: int | None = None
    held_out_windows: int | None = None
    probe: bool = False

    @property
    def name(self) -> str:
        """Of the run's folder."""
        if self.probe:
            return f"probe-{self.arm}-lr{self.train.learning_rate:g}"
        return f"{self.arm}-seed{self.seed}"


def work(config: WikitextRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train and measure; the metrics of the run."""
    made_by, files = commit(), prepared(directory.parent.parent / "data")
    size = {"layers": config.layers, "num_heads": config.num_heads, "head_dim": config.head_dim}
    made = configuration(config.arm, vocab_size=files.train.vocab_size, dropout=config.dropout, **size)
    model = NextToken(make_model(made, config.seed))
    windows = Windows(files.train, config.window, config.seed)
    metrics = {
        "arm": config.arm,
        "seed": config.seed,
        "learning_rate": config.train.learning_rate,
        "weights_beside_embedding": weights_beside_embedding(model.language_model),
        "recurrent_state": recurrent_state(model.language_model),
        "tokens": config.train.steps * config.train.batch_size * config.window,
    }

    def validation(_step: int) -> float:
        return losses_of(model, files.validation, config.window, config.held_out_windows)[1].mean().item()

    trained, measured = train_in_stages(
        model,
        lambda step: {"input_ids": windows.batch(step, config.train.batch_size)},
        all_losses,
        config.train,
        milestones=[max(1, config.train.steps * i // 5) for i in range(1, 5)],
        measure=validation,
        seed=config.seed,
        directory=directory,
        watch=watch,
        rows_at_a_time=config.rows_at_a_time,
        accelerator=make_accelerator(config.precision),
    )
    metrics |= {"steps": trained.step, "training_loss": trained.loss, "seconds": round(trained.seconds, 1)}
    metrics |= {"validation": {"loss": measured[str(trained.step)], "curve": measured}, "held_out": None}
    if not config.probe:
        tokens, losses = losses_of(model, files.held_out, config.window, config.held_out_windows)
        hits = ar_hits(tokens, files.bigrams)
        metrics["held_out"] = {
            name: {"tokens": part.tokens, "loss": part.loss, "perplexity": part.perplexity}
            for name, part in slices(hits, losses).items()
        }
    return {**metrics, "commit": made_by}


@torch.no_grad()
def losses_of(model: NextToken, tokens: TokenFile, window: int, most: int | None) -> tuple[Tensor, Tensor]:
    """Windows of a text, [N,L], and the model's losses of their predicted tokens, [N,L−1]."""
    place = next(model.parameters()).device
    model.eval()
    windows = torch.cat([*Windows(tokens, window).in_order(64)])[:most]
    losses = torch.cat([model(rows.to(place)).float().cpu() for rows in windows.split(4)])
    model.train()
    return windows, losses
