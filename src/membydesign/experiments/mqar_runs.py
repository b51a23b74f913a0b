"""One run of MQAR: a model trained on a mixture of examples, validated, and tested on new ones."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from membydesign.data.mqar_mixture import Mixture, Pool
from membydesign.errors import FilterError
from membydesign.experiments.mqar_models import MQARModel, device, make_model, parameters
from membydesign.experiments.record import commit
from membydesign.training import Diverged, TrainSettings, measured, train_in_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from membydesign.data.mqar import MQAR, Examples
    from membydesign.training import Progress

AT_A_TIME = 64
"""Sequences of a batch in evaluation."""


@dataclass(frozen=True)
class MQARRun:
    """Settings of one run.

    Attributes:
        variant: "base", "update" or "block"; names the folder, and nothing else depends on it.
        arm: a name of `ARMS`.
        kinds: of the examples, in equal shares.
        learning_rate: the peak.
        width: of the model.
        head_dim: rows of each head's memory.
        seed: of weights and training examples; models of one seed see the same examples.
        train_examples: of the pool that is visited in every epoch.
        validation_examples: on which learning rates are chosen.
        test_examples: on which nothing is chosen.
        curve_examples: the first of the validation examples, on which the model is measured during training.
        curve_points: how often, evenly over the run.
        epochs: visits of the pool.
        batch_size: sequences of one step, all of one kind.
        warmup: steps.
        embedding_range: standard deviation with which embeddings start.
        tied: whether the readout shares the weights of the embedding.
    """

    variant: str
    arm: str
    kinds: tuple[MQAR, ...]
    learning_rate: float
    width: int = 128
    head_dim: int = 32
    seed: int = 0
    train_examples: int = 100_000
    validation_examples: int = 4_800
    test_examples: int = 9_600
    curve_examples: int = 480
    curve_points: int = 10
    epochs: int = 40
    batch_size: int = 256
    warmup: int = 1024
    embedding_range: float = 0.02
    tied: bool = True

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.variant}-{self.arm}-d{self.width}-lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def steps(self) -> int:
        """Batches of the whole run."""
        return self.epochs * steps_per_epoch(self.kinds, self.train_examples, self.batch_size)

    @property
    def train(self) -> TrainSettings:
        """The paper's optimiser; it states no clipping for MQAR."""
        return TrainSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            decayed="matrices",
            clip=None,
            warmup=self.warmup,
            final_fraction=0.1,
        )

    @property
    def tokens(self) -> int:
        """Tokens of all training batches."""
        shares = Mixture(self.kinds).shares(self.train_examples)
        batches = [(share // self.batch_size, kind.length) for share, kind in zip(shares, self.kinds, strict=True)]
        return self.epochs * self.batch_size * sum(n * L for n, L in batches)

    @property
    def milestones(self) -> list[int]:
        """The steps after which the model is measured; the last step is one."""
        steps, points = self.steps, self.curve_points
        return sorted({max(1, round(steps * i / points)) for i in range(1, points + 1)})

    def model(self) -> MQARModel:
        """The model before training."""
        torch.manual_seed(self.seed)
        return make_model(
            self.arm,
            self.width,
            self.head_dim,
            vocab_size=self.kinds[0].vocab_size,
            length=max(kind.length for kind in self.kinds),
            embedding_range=self.embedding_range,
            tied=self.tied,
        )

    def batch(self, step: int) -> dict[str, Tensor]:
        """The training batch of a step."""
        pool = pool_of(self.kinds, self.train_examples, "train", self.seed)
        return at_queries(pool.batch(step, self.batch_size))

    def held_out(self, split: str, examples: int) -> Pool:
        """Examples that are the same for every model and seed; fewer are the first of more."""
        return pool_of(self.kinds, examples, split, 0)


def steps_per_epoch(kinds: tuple[MQAR, ...], examples: int, batch_size: int) -> int:
    """Batches of one visit of a pool, each of one kind; what does not fill the last of a kind is left out."""
    return sum(share // batch_size for share in Mixture(kinds).shares(examples))


@lru_cache(maxsize=4)
def pool_of(kinds: tuple[MQAR, ...], examples: int, split: str, seed: int) -> Pool:
    """A pool of examples; runs of one process share it."""
    return Mixture(kinds).pool(examples, split, seed)


def at_queries(examples: Examples) -> dict[str, Tensor]:
    """Tokens up to the last query, [B,T], and positions, labels and rewrites of the D queries of each row, [B,D].

    Nothing after the last query is ever read. All rows must ask for as many keys, as those of one kind do.
    """
    queries = examples.asked.nonzero()[:, 1].view(len(examples), -1)
    return {
        "input_ids": examples.input_ids[:, : int(queries.max()) + 1],
        "queries": queries,
        "labels": examples.labels.gather(1, queries),
        "rewrites": examples.rewrites.gather(1, queries),
    }


def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of every query, for the training loop, [B·D]."""
    logits = model(batch["input_ids"], batch["queries"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")


class Answers(NamedTuple):
    """What a model answered to N queries, and to which.

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
    """The model's answers to all queries of a pool."""
    found: list[tuple[Tensor, ...]] = []
    model.eval()
    for kind, examples in pool.in_order(AT_A_TIME):
        batch = {name: x.to(device(model)) for name, x in at_queries(examples).items()}
        logits, labels = model(batch["input_ids"], batch["queries"]).flatten(0, 1), batch["labels"].flatten()
        each = (
            (logits.argmax(-1) == labels).double(),
            F.cross_entropy(logits, labels, reduction="none").double(),
            batch["rewrites"].flatten(),
            torch.full_like(labels, pool.mixture.kinds.index(kind)),
        )
        found.append(tuple(x.cpu() for x in each))
    return Answers(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def cell(given: Answers, where: Tensor | None = None) -> dict[str, float] | None:
    """Accuracy and cross-entropy of the queries of a mask, and how many they are; None if there is none."""
    correct, losses = (x if where is None else x[where] for x in (given.correct, given.losses))
    if not len(correct):
        return None
    return {"accuracy": correct.mean().item(), "cross_entropy": losses.mean().item(), "queries": len(correct)}


def summary(given: Answers, kinds: tuple[MQAR, ...]) -> dict[str, Any]:
    """All metrics of a test: over all queries, by kind, by pairs D, by rewrites, and by rewrites at each D."""
    pairs = torch.tensor([kind.pairs for kind in kinds])[given.kinds]

    def by_rewrites(where: Tensor) -> dict[str, Any]:
        found = given.rewrites[where].unique().tolist()
        return {
            "untouched": cell(given, where & (given.rewrites == 0)),
            "updated": cell(given, where & (given.rewrites > 0)),
            "by_rewrites": {str(n): cell(given, where & (given.rewrites == n)) for n in found},
        }

    everywhere = torch.ones_like(pairs, dtype=torch.bool)
    return {
        **(cell(given) or {}),
        **by_rewrites(everywhere),
        "by_kind": [
            {"L": kind.length, "D": kind.pairs, "U": kind.updates, "B": kind.block, **(cell(given, at) or {})}
            for kind, at in ((kind, given.kinds == i) for i, kind in enumerate(kinds))
        ],
        "by_pairs": {
            str(D): {**(cell(given, pairs == D) or {}), **by_rewrites(pairs == D)} for D in pairs.unique().tolist()
        },
    }


def work(config: MQARRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train, validate and test; the metrics of the run. One that diverges has a step at which it did, and no tests."""
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
        found = {"steps": trained.step, "training_loss": trained.loss, "validation": cell(validation)}
        metrics |= {**found, "test": summary(test, config.kinds)}
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
    """The answers to held-out examples after a step; a model whose weights have just overflowed has diverged."""
    given = answers(model, config.held_out(split, examples))
    loss = given.losses.mean().item()
    if not math.isfinite(loss):
        raise Diverged(step, f"cross-entropy on {split} examples", loss)
    return given


def _finite(model: MQARModel) -> bool:
    """Whether weights are numbers, and not so large that their products overflow."""
    return all(bool(p.square().sum().isfinite()) for p in model.parameters())
