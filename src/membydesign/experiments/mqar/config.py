"""Settings of the MQAR experiment: three variants, four presets of each, and the runs that they consist of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from membydesign.data.mqar_mixture import Mixture, base_mixture, block_mixture, update_mixture
from membydesign.errors import did_you_mean
from membydesign.experiments.mqar import paper
from membydesign.experiments.mqar.models import ARMS, MQARModel, at_queries, make_model
from membydesign.experiments.shared.settings import shared_values
from membydesign.training import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.data.mqar import MQAR
    from membydesign.data.mqar_mixture import Pool

VARIANTS = ("base", "update", "block")


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """The training examples of a variant.

    Attributes:
        kinds: the kinds of examples, in equal shares.
        train_examples: the size of the pool that is visited in every epoch.
    """

    kinds: tuple[MQAR, ...]
    train_examples: int = paper.TRAIN_EXAMPLES["base"]

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the steps of one epoch. Each batch has one kind; what does not fill its last batch is left out."""
        return sum(share // batch_size for share in Mixture(self.kinds).shares(self.train_examples))


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How every model is built, trained and measured; by default as in the paper.

    Attributes:
        epochs: visits of the pool.
        batch_size: sequences per step, all of one kind.
        head_dim: rows of each head's memory.
        validation_examples: examples that choose the learning rate. The paper does not state this size.
        test_examples: examples that compare models. The paper does not state this size.
        curve_examples: the first of the validation examples, on which models are measured during training.
        embedding_range: initial standard deviation of embeddings in all models; linear maps have 2/√width.
        tied: whether the readout shares the weights of the embedding, in all models, as in Zoology.
    """

    epochs: int = paper.EPOCHS
    batch_size: int = paper.BATCH_SIZE
    head_dim: int = paper.HEAD_DIM
    validation_examples: int = 4_800
    test_examples: int = 9_600
    curve_examples: int = 480
    embedding_range: float = 0.02
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class MQARRun(TrainingSet, RunSettings):
    """Settings of one run.

    Attributes:
        variant: "base", "update" or "block"; part of the folder's name only.
        arm: a name of `ARMS`.
        learning_rate: the peak.
        width: the width of the model.
        seed: for weights and training examples; models of one seed see the same examples.
        curve_points: how often the model is measured during training.
        warmup: steps.
    """

    variant: str
    arm: str
    learning_rate: float
    width: int = paper.WIDTH
    seed: int = 0
    curve_points: int = 10
    warmup: int = paper.WARMUP

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.variant}-{self.arm}-d{self.width}-lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def train(self) -> TrainSettings:
        """The paper's optimiser; the paper states no clipping for MQAR."""
        return TrainSettings(
            steps=self.epochs * self.steps_per_epoch(self.batch_size),
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
        """Tokens in all training batches."""
        shares = Mixture(self.kinds).shares(self.train_examples)
        batches = [(share // self.batch_size, kind.length) for share, kind in zip(shares, self.kinds, strict=True)]
        return self.epochs * self.batch_size * sum(n * L for n, L in batches)

    @property
    def milestones(self) -> list[int]:
        """The steps after which the model is measured, including the last."""
        steps, points = self.train.steps, self.curve_points
        return sorted({max(1, round(steps * i / points)) for i in range(1, points + 1)})

    def model(self) -> MQARModel:
        """Build the untrained model."""
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
        """Return the training batch of a step."""
        pool = pool_of(self.kinds, self.train_examples, "train", self.seed)
        return at_queries(pool.batch(step, self.batch_size))

    def held_out(self, split: str, examples: int) -> Pool:
        """Return examples that are the same for every model and seed; a smaller pool is the start of a larger one."""
        return pool_of(self.kinds, examples, split, 0)


@lru_cache(maxsize=4)
def pool_of(kinds: tuple[MQAR, ...], examples: int, split: str, seed: int) -> Pool:
    """Return a pool of examples, which runs of one process share."""
    return Mixture(kinds).pool(examples, split, seed)


@dataclass(frozen=True, kw_only=True)
class Task(TrainingSet):
    """The examples of one variant, and the models that it compares.

    Attributes:
        learning_rates: the grid.
        arms: names of `ARMS`.
        widths: the widths of the models.
    """

    learning_rates: tuple[float, ...]
    arms: tuple[str, ...] = tuple(ARMS)
    widths: tuple[int, ...] = (paper.WIDTH,)

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arms: expected names among {', '.join(ARMS)}, got {arm!r}")
        for name in ("kinds", "learning_rates", "arms", "widths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: expected at least one, and no two alike, got {values!r}")


_PAPER = {
    variant: Task(
        kinds=mixture.kinds,
        train_examples=paper.TRAIN_EXAMPLES[variant],
        learning_rates=paper.LEARNING_RATES[variant],
        widths=(64, 128, 256) if variant == "base" else (paper.WIDTH,),
    )
    for variant, mixture in zip(VARIANTS, (base_mixture(), update_mixture(), block_mixture()), strict=True)
}


@dataclass(frozen=True, kw_only=True)
class MQARConfig(RunSettings):
    """Settings of the experiment; by default the paper's.

    Attributes:
        variant: which of the three is run.
        base: Base-MQAR, at three widths.
        update: Update-MQAR.
        block: Block-MQAR.
        warmup: steps; None for a tenth of all.
        whole_grid: whether every learning rate is tried, as in the paper. Otherwise they are tried from the largest
            on, and no further once a model recalls and a smaller one was worse, or validation is near-perfect.
        seeds: number of seeds.
    """

    variant: str = "base"
    base: Task = _PAPER["base"]
    update: Task = _PAPER["update"]
    block: Task = _PAPER["block"]
    warmup: int | None = paper.WARMUP
    whole_grid: bool = True
    seeds: int = 1

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            near = did_you_mean(self.variant, VARIANTS)
            raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {self.variant!r}{near}")
        for name in ("epochs", "batch_size", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)!r}")

    @property
    def task(self) -> Task:
        """The variant that is run."""
        return getattr(self, self.variant)

    @property
    def steps(self) -> int:
        """Steps of each run."""
        return self.epochs * self.task.steps_per_epoch(self.batch_size)

    @property
    def share_of_paper(self) -> float:
        """Examples seen in training, as a fraction of the paper's."""
        ours = self.epochs * self.task.train_examples
        return ours / (paper.EPOCHS * paper.TRAIN_EXAMPLES[self.variant])

    def runs(self, arm: str, width: int, learning_rate: float) -> list[MQARRun]:
        """Return the runs of a model with a learning rate, one per seed."""
        shared = shared_values(MQARRun, self) | shared_values(MQARRun, self.task)
        shared["warmup"] = max(1, self.steps // 10) if self.warmup is None else self.warmup
        model = {"arm": arm, "width": width, "learning_rate": learning_rate}
        return [MQARRun(**shared, **model, seed=seed) for seed in range(self.seeds)]


PAPER = MQARConfig()

_SIX = ("bayesian_layer", "gated_deltanet", "gated_deltanet_no_conv", "mamba2", "mamba2_no_conv", "attention")

CPU = replace(
    PAPER,
    base=replace(
        PAPER.base,
        kinds=base_mixture(((64, 4), (64, 8))).kinds,
        learning_rates=(1e-3, 3e-3, 5e-3, 1e-2),
        train_examples=48_000,
        arms=_SIX,
        widths=(paper.WIDTH,),
    ),
    update=replace(
        PAPER.update,
        kinds=update_mixture((64,), (4,)).kinds,
        learning_rates=(*PAPER.update.learning_rates, 1e-2),
        train_examples=48_000,
        arms=_SIX,
    ),
    block=replace(
        PAPER.block,
        kinds=block_mixture(64).kinds,
        learning_rates=(3e-3, 5e-3),
        train_examples=192_000,
        arms=_SIX,
    ),
    epochs=2,
    batch_size=32,
    warmup=None,
    validation_examples=1_200,
    test_examples=4_800,
    curve_examples=240,
    whole_grid=False,
)
"""The paper's models and vocabulary, sequences of 64 tokens alone (for block the paper has 128), and about two per cent
of its training, eight for block: all models spend hundreds of steps before any recall emerges, and on blocks those
without a convolution more than 3,000. Few steps ask for large learning rates: of the paper's grid for base, 1e-4 to
1e-3, only the largest is left, of that for block none, and larger ones are added; for block just two, since runs on
blocks are long."""

_FOUR = ("bayesian_layer", "gated_deltanet", "gated_deltanet_no_conv", "mamba2")


def _long(task: Task, kinds: tuple[MQAR, ...]) -> Task:
    return replace(task, kinds=kinds, learning_rates=(5e-3, 1e-2), arms=_FOUR)


CPU_LONG = replace(
    CPU,
    base=_long(CPU.base, PAPER.base.kinds),
    update=_long(CPU.update, PAPER.update.kinds),
    block=_long(CPU.block, PAPER.block.kinds),
)
"""As `CPU`, with all lengths and numbers of pairs of the paper, so that memories are asked to keep much more. Only of
models that learn to recall within so few steps, with the learning rates at which they do."""


def _smoke(task: Task, mixture: Mixture, arms: tuple[str, ...], learning_rates: tuple[float, ...] = (1e-2,)) -> Task:
    return replace(
        task, kinds=mixture.kinds, learning_rates=learning_rates, train_examples=240, arms=arms, widths=(32,)
    )


SMOKE = replace(
    PAPER,
    base=_smoke(
        PAPER.base,
        base_mixture(((16, 2), (32, 4)), vocab_size=64),
        ("bayesian_layer", "gated_deltanet"),
        learning_rates=(3e-3, 1e-2),
    ),
    update=_smoke(
        PAPER.update, update_mixture((32,), (4,), vocab_size=64), ("bayesian_layer", "gated_deltanet", "mamba2")
    ),
    block=_smoke(
        PAPER.block, block_mixture(32, blocks=(1, 2), vocab_size=64), ("bayesian_layer", "gated_deltanet_no_conv")
    ),
    epochs=2,
    batch_size=16,
    warmup=None,
    head_dim=8,
    validation_examples=48,
    test_examples=96,
    curve_examples=24,
)
"""Checks that the pipeline runs; its numbers are meaningless."""

PRESETS = {"smoke": SMOKE, "cpu": CPU, "cpu-long": CPU_LONG, "paper": PAPER}
