"""Settings of the MQAR experiment: three variants, and four presets of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from membydesign.data.mqar_mixture import base_mixture, block_mixture, update_mixture
from membydesign.errors import did_you_mean
from membydesign.experiments import mqar_paper as paper
from membydesign.experiments.mqar_models import ARMS
from membydesign.experiments.mqar_runs import MQARRun, steps_per_epoch

if TYPE_CHECKING:
    from membydesign.data.mqar import MQAR
    from membydesign.data.mqar_mixture import Mixture

VARIANTS = ("base", "update", "block")

_CONVOLUTION = ("gated_deltanet", "gated_deltanet_no_conv", "mamba2", "mamba2_no_conv")


@dataclass(frozen=True)
class Task:
    """What one variant asks, and of whom.

    Attributes:
        kinds: of its examples.
        learning_rates: the grid.
        train_examples: of the pool.
        arms: the models.
        widths: of the models.
    """

    kinds: tuple[MQAR, ...]
    learning_rates: tuple[float, ...]
    train_examples: int
    arms: tuple[str, ...]
    widths: tuple[int, ...] = (paper.WIDTH,)

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arms: expected names among {', '.join(ARMS)}, got {arm!r}")
        for name in ("kinds", "learning_rates", "arms", "widths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: expected at least one, and no two alike, got {values!r}")


@dataclass(frozen=True)
class MQARConfig:
    """The paper's settings, where nothing else is said.

    Attributes:
        variant: which of the three is run.
        base: Base-MQAR, at three widths.
        update: Update-MQAR.
        block: Block-MQAR.
        epochs: visits of the pool.
        batch_size: sequences of one step, all of one kind.
        warmup: steps; None for a tenth of all.
        head_dim: rows of each head's memory.
        validation_examples: on which learning rates are chosen. The paper does not say how many; nor of the next.
        test_examples: on which the chosen ones are compared.
        curve_examples: the first of the validation examples, on which models are measured ten times during training.
        embedding_range: standard deviation with which embeddings start, in all models; linear maps have 2/√width.
        tied: whether the readout shares the weights of the embedding, in all models, as in Zoology.
        whole_grid: whether every learning rate is tried, as in the paper. Otherwise they are tried from the largest on,
            and no further once a model recalls and a smaller one was worse, or validation is near-perfect.
        seeds: how many.
    """

    variant: str = "base"
    base: Task = Task(
        base_mixture().kinds,
        paper.LEARNING_RATES["base"],
        paper.TRAIN_EXAMPLES["base"],
        tuple(ARMS),
        widths=(64, 128, 256),
    )
    update: Task = Task(
        update_mixture().kinds, paper.LEARNING_RATES["update"], paper.TRAIN_EXAMPLES["update"], tuple(ARMS)
    )
    block: Task = Task(block_mixture().kinds, paper.LEARNING_RATES["block"], paper.TRAIN_EXAMPLES["block"], tuple(ARMS))
    epochs: int = paper.EPOCHS
    batch_size: int = paper.BATCH_SIZE
    warmup: int | None = paper.WARMUP
    head_dim: int = paper.HEAD_DIM
    validation_examples: int = 4_800
    test_examples: int = 9_600
    curve_examples: int = 480
    embedding_range: float = 0.02
    tied: bool = True
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
        """Of each run."""
        return self.epochs * steps_per_epoch(self.task.kinds, self.task.train_examples, self.batch_size)

    @property
    def share_of_paper(self) -> float:
        """Examples seen in training, as a fraction of the paper's."""
        ours = self.epochs * self.task.train_examples
        return ours / (paper.EPOCHS * paper.TRAIN_EXAMPLES[self.variant])

    def runs(self, arm: str, width: int, learning_rate: float) -> list[MQARRun]:
        """One for each seed."""
        return [
            MQARRun(
                variant=self.variant,
                arm=arm,
                kinds=self.task.kinds,
                learning_rate=learning_rate,
                width=width,
                head_dim=self.head_dim,
                seed=seed,
                train_examples=self.task.train_examples,
                validation_examples=self.validation_examples,
                test_examples=self.test_examples,
                curve_examples=self.curve_examples,
                epochs=self.epochs,
                batch_size=self.batch_size,
                warmup=max(1, self.steps // 10) if self.warmup is None else self.warmup,
                embedding_range=self.embedding_range,
                tied=self.tied,
            )
            for seed in range(self.seeds)
        ]


PAPER = MQARConfig()

_SIX = ("bayesian_layer", *_CONVOLUTION, "attention")

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
"""Shows that everything works, and means nothing else."""

PRESETS = {"smoke": SMOKE, "cpu": CPU, "cpu-long": CPU_LONG, "paper": PAPER}
