"""Do one run of MQAR: train a model on a mixture of examples, validate it, and test it on new ones."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from membydesign.errors import FilterError
from membydesign.experiments.mqar.models import MQARModel, at_queries, device, losses, parameters
from membydesign.reports.provenance import commit
from membydesign.training import Diverged, measured, train_in_stages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from membydesign.data.mqar import MQAR
    from membydesign.data.mqar_mixture import Pool
    from membydesign.experiments.mqar.config import MQARRun
    from membydesign.training import Progress

AT_A_TIME = 64
"""Batch size of evaluation."""


class Answers(NamedTuple):
    """The answers of a model to N queries.

    Attributes:
        correct: whether the likeliest token was the right one, [N].
        losses: cross-entropy, [N].
        rewrites: how often the key was rewritten, [N].
        kinds: the index of the kind of example, [N].
    """

    correct: Tensor
    losses: Tensor
    rewrites: Tensor
    kinds: Tensor


@torch.no_grad()
def answers(model: MQARModel, pool: Pool) -> Answers:
    """Answer all queries of a pool."""
    parts: list[tuple[Tensor, ...]] = []
    model.eval()
    for kind, examples in pool.in_order(AT_A_TIME):
        batch = {name: x.to(device(model)) for name, x in at_queries(examples).items()}
        logits, labels = model(batch["input_ids"], batch["queries"]).flatten(0, 1), batch["labels"].flatten()
        part = (
            (logits.argmax(-1) == labels).double(),
            F.cross_entropy(logits, labels, reduction="none").double(),
            batch["rewrites"].flatten(),
            torch.full_like(labels, pool.mixture.kinds.index(kind)),
        )
        parts.append(tuple(x.cpu() for x in part))
    return Answers(*(torch.cat(part) for part in zip(*parts, strict=True)))


def cell(answered: Answers, where: Tensor | None = None) -> dict[str, float] | None:
    """Return accuracy, cross-entropy and number of the queries of a mask; None if there is none."""
    correct, losses = (x if where is None else x[where] for x in (answered.correct, answered.losses))
    if not len(correct):
        return None
    return {"accuracy": correct.mean().item(), "cross_entropy": losses.mean().item(), "queries": len(correct)}


def summary(answered: Answers, kinds: tuple[MQAR, ...]) -> dict[str, Any]:
    """Return all metrics of a test: over all queries, by kind, by pairs D, by rewrites, and by rewrites at each D."""
    pairs = torch.tensor([kind.pairs for kind in kinds])[answered.kinds]

    def by_rewrites(where: Tensor) -> dict[str, Any]:
        counts = answered.rewrites[where].unique().tolist()
        return {
            "untouched": cell(answered, where & (answered.rewrites == 0)),
            "updated": cell(answered, where & (answered.rewrites > 0)),
            "by_rewrites": {str(n): cell(answered, where & (answered.rewrites == n)) for n in counts},
        }

    everywhere = torch.ones_like(pairs, dtype=torch.bool)
    return {
        **(cell(answered) or {}),
        **by_rewrites(everywhere),
        "by_kind": [
            {"L": kind.length, "D": kind.pairs, "U": kind.updates, "B": kind.block, **(cell(answered, at) or {})}
            for kind, at in ((kind, answered.kinds == i) for i, kind in enumerate(kinds))
        ],
        "by_pairs": {
            str(D): {**(cell(answered, pairs == D) or {}), **by_rewrites(pairs == D)} for D in pairs.unique().tolist()
        },
    }


def work(config: MQARRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train, validate and test; return the metrics. A run that diverges records the step, and has no tests."""
    model, started, reached = config.model(), time.perf_counter(), 0

    def see(progress: Progress) -> None:
        nonlocal reached
        reached = progress.step
        watch(progress)

    state, made_by = model.state_size(), commit()
    metrics = {
        "arm": config.arm,
        "width": config.width,
        "learning_rate": config.learning_rate,
        "seed": config.seed,
        "parameters": parameters(model),
        "state": None if state is None else {**state._asdict(), "recurrent": state.recurrent},
        "tokens": config.tokens,
        "diverged": None,
    }

    def accuracy(step: int) -> dict[str, float] | None:
        return cell(_held_out(config, model, "validation", config.curve_examples, step))

    try:
        trained, _ = train_in_stages(
            model,
            config.batch,
            losses,
            config.train,
            milestones=config.milestones,
            measure=accuracy,
            seed=config.seed,
            directory=directory,
            watch=see,
        )
        validation = _held_out(config, model, "validation", config.validation_examples, trained.step)
        test = _held_out(config, model, "test", config.test_examples, trained.step)
        metrics |= {"steps": trained.step, "training_loss": trained.loss, "validation": cell(validation)}
        metrics["test"] = summary(test, config.kinds)
        seconds = trained.seconds
    except (Diverged, FilterError, ValueError) as error:
        if not isinstance(error, (Diverged, FilterError)) and _finite(model):
            raise
        step = error.step if isinstance(error, Diverged) else reached
        metrics |= {"steps": step, "diverged": step, "why": str(error), "validation": None, "test": None}
        seconds = time.perf_counter() - started
    curve = [{"step": int(step), **point} for step, point in measured(directory).items()]
    return {**metrics, "curve": curve, "seconds": round(seconds, 1), "commit": made_by}


def _held_out(config: MQARRun, model: MQARModel, split: str, examples: int, step: int) -> Answers:
    """Answer held-out examples after a step; raise Diverged if the weights have overflowed."""
    answered = answers(model, config.held_out(split, examples))
    loss = answered.losses.mean().item()
    if not math.isfinite(loss):
        raise Diverged(step, f"cross-entropy on {split} examples", loss)
    return answered


def _finite(model: MQARModel) -> bool:
    """Return whether weights are finite, and small enough that their products do not overflow."""
    return all(bool(p.square().sum().isfinite()) for p in model.parameters())
