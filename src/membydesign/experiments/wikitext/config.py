"""Settings of the from-scratch comparison: the paper's, and what two cores can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from membydesign.experiments.shared.settings import shared_values
from membydesign.experiments.shared.texts import Texts
from membydesign.experiments.wikitext.models import ARMS
from membydesign.training import TrainSettings

if TYPE_CHECKING:
    from membydesign.training.distributed import Precision

_WIKITEXT = "hub:Salesforce/wikitext:wikitext-103-v1"

PAPER_TEXTS = Texts(
    train=(f"{_WIKITEXT}:train",),
    validation=(f"{_WIKITEXT}:validation",),
    held_out=(f"{_WIKITEXT}:validation", f"{_WIKITEXT}:test"),
    tokenizer="fla-hub/gla-1.3B-100B",
)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that the experiment and its runs share; by default the paper's.

    Attributes:
        window: L, tokens.
        layers: see `configuration`.
        num_heads: H.
        head_dim: D.
        dropout: of the hidden units of MLPs.
        precision: "fp32" or "bf16".
        rows_at_a_time: windows per process at a time; None for its whole share.
        held_out_windows: windows on which models are measured; None for all.
    """

    window: int = 2048
    layers: int = 4
    num_heads: int = 4
    head_dim: int = 128
    dropout: float = 0.4
    precision: Precision = "bf16"
    rows_at_a_time: int | None = 16
    held_out_windows: int | None = 288


@dataclass(frozen=True, kw_only=True)
class WikitextRun(RunSettings):
    """Settings of one run.

    Attributes:
        arm: a name of `ARMS`.
        seed: for weights, order of windows and dropout; models of one seed see the same tokens.
        train: optimiser and schedule; its batches are windows.
        probe: whether the run chooses a learning rate: measured on validation windows, and not on held-out ones.
    """

    arm: str
    seed: int
    train: TrainSettings
    probe: bool = False

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        if self.probe:
            return f"probe-{self.arm}-lr{self.train.learning_rate:g}"
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class WikitextConfig(RunSettings):
    """Settings of the experiment; by default the paper's.

    Attributes:
        texts: what is read.
        steps: steps of each run; the paper's 7,935 are four epochs of 130M tokens.
        batch_size: windows per step, over all processes.
        learning_rates: if several, the one with the lowest validation loss of Gated DeltaNet is used for all models.
        probe_steps: steps of each run that chooses it.
        warmup: share of the steps.
        arms: the models.
        seeds: number of seeds.
    """

    texts: Texts = PAPER_TEXTS
    steps: int = 7935
    batch_size: int = 32
    learning_rates: tuple[float, ...] = (6e-4,)
    probe_steps: int = 0
    warmup: float = 0.04
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: int = 3

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arms: expected names among {', '.join(ARMS)}, got {arm!r}")
        if self.seeds < 1:
            raise ValueError(f"seeds: expected at least 1, got {self.seeds}")
        if len(self.learning_rates) > 1 and self.probe_steps < 1:
            raise ValueError(f"probe_steps: expected at least 1 to choose a learning rate, got {self.probe_steps}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all processes: 65,536 in the paper."""
        return self.batch_size * self.window

    @property
    def share_of_paper(self) -> float:
        """Tokens of training, as a fraction of the paper's."""
        return self.steps * self.tokens_per_step / (PAPER.steps * PAPER.tokens_per_step)

    def settings(self, learning_rate: float, steps: int) -> TrainSettings:
        """Return the paper's optimiser."""
        return TrainSettings(
            steps=steps,
            batch_size=self.batch_size,
            learning_rate=learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            decayed="matrices",
            clip=1.0,
            warmup=max(1, round(self.warmup * steps)),
            final_fraction=0.1,
            save_every=min(250, max(1, steps // 10)),
        )

    def run(self, arm: str, seed: int, learning_rate: float, *, probe: bool = False) -> WikitextRun:
        """Return one run."""
        train = self.settings(learning_rate, self.probe_steps if probe else self.steps)
        return WikitextRun(**shared_values(WikitextRun, self), arm=arm, seed=seed, train=train, probe=probe)

    def probes(self) -> list[WikitextRun]:
        """Return the runs of Gated DeltaNet that choose a learning rate; none if there is only one."""
        if len(self.learning_rates) == 1:
            return []
        return [self.run("gated_deltanet", 0, rate, probe=True) for rate in self.learning_rates]

    def runs(self, learning_rate: float) -> list[WikitextRun]:
        """Return the runs of every model with every seed, seed by seed."""
        return [self.run(arm, seed, learning_rate) for seed in range(self.seeds) for arm in self.arms]


PAPER = WikitextConfig()

CPU = replace(
    PAPER,
    texts=Texts(
        train=("gutenberg/train", "wikitext-103/wiki.train-head.tokens"),
        validation=("wikitext-103/wiki.valid.tokens",),
        held_out=("wikitext-103/wiki.test.tokens",),
        tokenizer=8192,
    ),
    steps=1000,
    batch_size=4,
    window=1024,
    learning_rates=(1e-3, 2e-3, 4e-3, 8e-3),
    probe_steps=300,
    layers=2,
    num_heads=4,
    head_dim=32,
    dropout=0.0,
    precision="fp32",
    rows_at_a_time=None,
    held_out_windows=None,
)
"""Small models on books and the head of WikiText-103, measured on its official test split."""

SMOKE = replace(
    CPU,
    texts=Texts(
        train=("python-help:train",),
        validation=("python-help:validation",),
        held_out=("python-help:validation",),
        tokenizer=512,
    ),
    steps=6,
    batch_size=2,
    window=128,
    learning_rates=(1e-3, 2e-3),
    probe_steps=2,
    num_heads=2,
    head_dim=8,
    held_out_windows=16,
    seeds=2,
)
"""Checks that the pipeline runs; its numbers are meaningless."""

PRESETS = {"smoke": SMOKE, "cpu": CPU, "paper": PAPER}
