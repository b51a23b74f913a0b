"""Settings of the from-scratch comparison: the paper's, and what two cores can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from membydesign.experiments.texts import Texts
from membydesign.experiments.wikitext_models import ARMS
from membydesign.experiments.wikitext_runs import WikitextRun
from membydesign.training import TrainSettings

if TYPE_CHECKING:
    from membydesign.training.processes import Precision

_WIKITEXT = "hub:Salesforce/wikitext:wikitext-103-v1"

PAPER_TEXTS = Texts(
    train=(f"{_WIKITEXT}:train",),
    validation=(f"{_WIKITEXT}:validation",),
    held_out=(f"{_WIKITEXT}:validation", f"{_WIKITEXT}:test"),
    tokenizer="fla-hub/gla-1.3B-100B",
)


@dataclass(frozen=True)
class WikitextConfig:
    """The paper's settings, where nothing else is said; attributes that `WikitextRun` has too are the same there.

    Attributes:
        texts: what is read.
        steps: of each run; the paper's 7,935 are four epochs of 130M tokens.
        batch_size: windows of a step, over all processes.
        learning_rates: of several, the one with the lowest validation loss of Gated DeltaNet is taken for all models.
        probe_steps: of each run that chooses it.
        warmup: share of the steps.
        arms: the models.
        seeds: how many.
    """

    texts: Texts = PAPER_TEXTS
    steps: int = 7935
    batch_size: int = 32
    window: int = 2048
    learning_rates: tuple[float, ...] = (6e-4,)
    probe_steps: int = 0
    warmup: float = 0.04
    layers: int = 4
    num_heads: int = 4
    head_dim: int = 128
    dropout: float = 0.4
    precision: Precision = "bf16"
    rows_at_a_time: int | None = 16
    held_out_windows: int | None = 288
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
        """Of all processes: 65,536 in the paper."""
        return self.batch_size * self.window

    def settings(self, learning_rate: float, steps: int) -> TrainSettings:
        """The paper's optimiser."""
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
        """One run."""
        return WikitextRun(
            arm=arm,
            seed=seed,
            train=self.settings(learning_rate, self.probe_steps if probe else self.steps),
            window=self.window,
            layers=self.layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            dropout=self.dropout,
            precision=self.precision,
            rows_at_a_time=self.rows_at_a_time,
            held_out_windows=self.held_out_windows,
            probe=probe,
        )

    def probes(self) -> list[WikitextRun]:
        """The runs that choose a learning rate, of Gated DeltaNet; none if there is nothing to choose."""
        if len(self.learning_rates) == 1:
            return []
        return [self.run("gated_deltanet", 0, rate, probe=True) for rate in self.learning_rates]

    def runs(self, learning_rate: float) -> list[WikitextRun]:
        """Every model with every seed, seed by seed."""
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
"""Shows that everything works, and means nothing else."""

PRESETS = {"smoke": SMOKE, "cpu": CPU, "paper": PAPER}
