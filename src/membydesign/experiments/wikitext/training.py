"""Do one run of the from-scratch comparison: train a language model on text and measure it on AR-hits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.data.windows import Windows
from membydesign.evaluation.ar_hits import ar_hits, slices
from membydesign.experiments.shared.texts import prepared
from membydesign.experiments.wikitext.models import configuration, make_model, recurrent_state, weights_beside_embedding
from membydesign.reports.provenance import commit
from membydesign.training import NextToken, all_losses, make_accelerator, train_in_stages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from membydesign.data.token_files import TokenFile
    from membydesign.experiments.wikitext.config import WikitextRun
    from membydesign.training import Progress


def work(config: WikitextRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train and measure; return the metrics of the run."""
    made_by, files = commit(), prepared(directory.parent.parent / "data")
    size = {"layers": config.layers, "num_heads": config.num_heads, "head_dim": config.head_dim}
    architecture = configuration(config.arm, vocab_size=files.train.vocab_size, dropout=config.dropout, **size)
    model = NextToken(make_model(architecture, config.seed))
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
    """Return windows of a text, [N,L], and the model's losses on their predicted tokens, [N,L−1]."""
    device = next(model.parameters()).device
    model.eval()
    windows = torch.cat([*Windows(tokens, window).in_order(64)])[:most]
    losses = torch.cat([model(rows.to(device)).float().cpu() for rows in windows.split(4)])
    model.train()
    return windows, losses
