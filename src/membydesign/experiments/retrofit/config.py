"""Settings of the retrofit: the paper's, and a small world that two cores can do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from membydesign.evaluation.niah import NEW_TOKENS, TASKS
from membydesign.retrofit import PHASE_A, PhaseBSchedule, Stage
from membydesign.training import TrainSettings

if TYPE_CHECKING:
    from membydesign.retrofit.replace import Convolution, Start, TransitionName, WriteNoise
    from membydesign.training.distributed import Precision

CHECKPOINT = "linear-moe-hub/Gated-Deltanet-340M"
_SLIMPAJAMA = "hub:cerebras/SlimPajama-627B:"


@dataclass(frozen=True)
class Pretraining:
    """A Gated DeltaNet to train as the teacher, if there is no checkpoint to start from.

    Attributes:
        layers: blocks.
        num_heads: H.
        head_dim: D of keys and of values; the width is H·D.
        train: optimiser and schedule; its batches are windows.
        window: L, tokens.
        drill_steps: number of first steps, which are on `RetrofitTexts.drills`.
        initializer_range: standard deviation of starting weights. Small models that start with larger ones learn to
            recall sooner (results/mqar/NOTES.md).
        embedding_range: that of embeddings.
        seed: of weights and of the order of windows.
    """

    layers: int
    num_heads: int
    head_dim: int
    train: TrainSettings
    window: int
    drill_steps: int = 0
    initializer_range: float = 0.02
    embedding_range: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class RetrofitTexts:
    """The texts to read; names as in `membydesign.experiments.shared.texts.Texts`.

    Attributes:
        train: for pretraining, if there is any, and for both phases.
        drills: what pretraining begins with, see `Pretraining.drill_steps`.
        validation: on which training is followed.
        perplexity: on which models are compared, by what tables call it.
        vocabulary: tokens of a teacher that is trained here, learned from `words`. A checkpoint has its own tokenizer.
        digits: maximum digits per token of that vocabulary; see `train_tokenizer`.
        words: the text of such a vocabulary.
        essays: the haystack of RULER: "embedded", or a file or folder below the one that `--data` names.
        most_tokens: the most tokens of a text to read; texts that are not named are read whole.
        window_tokens: perplexity of a text is over as many windows as hold this many tokens; for texts that are not
            named, over all whole windows.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    perplexity: dict[str, tuple[str, ...]]
    drills: tuple[str, ...] = ()
    vocabulary: int | None = None
    digits: int = 1
    words: tuple[str, ...] = ()
    essays: str = "embedded"
    most_tokens: dict[str, int] = field(default_factory=dict)
    window_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Student:
    """Which layers are replaced, and how.

    Attributes:
        layers: indices of the layers that become Bayesian Layers.
        transition: see `membydesign.retrofit.retrofit`; and the next two. The paper leaves it open.
        convolution: kept or dropped; the paper leaves it open.
        start: of transition and noises, which are fresh in the paper.
        write_noise: its form, a softplus in the paper.
        matched: see `membydesign.retrofit.phase_b_loss`; the paper leaves it open.
    """

    layers: tuple[int, ...]
    transition: TransitionName = "rotation"
    convolution: Convolution = "keep"
    start: Start = "fresh"
    write_noise: WriteNoise = "softplus"
    matched: Literal["tokens", "layer_inputs"] = "tokens"


@dataclass(frozen=True)
class Distillation:
    """Both phases, and the control, which has the same tokens, masks and schedules, and cross-entropy for its loss.

    Attributes:
        window: L, tokens.
        phase_a: its length and its batches.
        phase_b: its two stages, and their weights.
        rates: peaks of the learning rate in Phase A and Phase B.
        warmups: steps of Phase A and Phase B.
        precision: "fp32" or "bf16".
        rows_at_a_time: windows of each process at a time; None for all of its share.
        validation_windows: on which training is followed.
        seed: of the order of windows.
    """

    window: int = 2048
    phase_a: Stage = PHASE_A
    phase_b: PhaseBSchedule = PhaseBSchedule()  # noqa: RUF009
    rates: tuple[float, float] = (5e-4, 3e-4)
    warmups: tuple[int, int] = (25, 50)
    precision: Precision = "bf16"
    rows_at_a_time: int | None = 8
    validation_windows: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for stage in (self.phase_a, self.phase_b.first, self.phase_b.second):
            if stage.tokens_per_step % self.window:
                raise ValueError(
                    f"tokens_per_step: expected a multiple of the window {self.window}, got {stage.tokens_per_step}"
                )

    @property
    def tokens(self) -> int:
        """Tokens of both phases."""
        return self.phase_a.tokens + self.phase_b.tokens

    def settings(self, phase: str) -> TrainSettings:
        """The paper's optimiser, for phase "a" or "b"; batches of the second stage of "b" are larger."""
        index = "ab".index(phase)
        steps = self.phase_a.steps if phase == "a" else self.phase_b.steps
        first = self.phase_a if phase == "a" else self.phase_b.first
        return TrainSettings(
            steps=steps,
            batch_size=first.tokens_per_step // self.window,
            learning_rate=self.rates[index],
            weight_decay=0.0,
            clip=1.0,
            warmup=self.warmups[index],
            final_fraction=0.1,
            save_every=min(100, max(1, steps // 5)),
        )

    def stretch(self, phase: str, step: int) -> tuple[int, int]:
        """Which windows of the stream a step has: the first, and how many. Phase B goes on where Phase A ends."""
        if phase == "a":
            count = self.phase_a.tokens_per_step // self.window
            return step * count, count
        start = self.phase_a.tokens // self.window
        first, stage = self.phase_b.first, self.phase_b.stage(step)
        count = stage.tokens_per_step // self.window
        if stage is first:
            return start + step * count, count
        return start + first.tokens // self.window + (step - first.steps) * count, count


@dataclass(frozen=True)
class Evaluation:
    """The tests that compare models.

    Attributes:
        lengths: of contexts and of windows, in tokens.
        samples: of each task and length of RULER's.
        tasks: of RULER's.
        new_tokens: of an answer.
        seed: of the samples.
    """

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    samples: int = 200
    tasks: tuple[str, ...] = tuple(TASKS)
    new_tokens: int = NEW_TOKENS
    seed: int = 0


@dataclass(frozen=True)
class RetrofitConfig:
    """Settings of the experiment; by default the paper's.

    Attributes:
        teacher: a checkpoint, by its name on the Hub or its folder; or how to train one.
        texts: the texts to read.
        student: which layers are replaced, and how.
        distillation: both phases and the control.
        evaluation: the tests that compare models.
    """

    teacher: str | Pretraining = CHECKPOINT
    texts: RetrofitTexts = RetrofitTexts(
        train=(f"{_SLIMPAJAMA}:train",),
        validation=(f"{_SLIMPAJAMA}:validation",),
        perplexity={
            "wikitext-103": ("hub:Salesforce/wikitext:wikitext-103-v1:test",),
            "slimpajama-heldout": (f"{_SLIMPAJAMA}:validation",),
            "pg19-validation": ("hub:emozilla/pg19::validation",),
        },
        essays="PaulGrahamEssays.json",
        # Both phases need 400,293,888; one million of SlimPajama rounded up to windows of 16,384; three of PG-19.
        most_tokens={
            "train": 400_293_888,
            "validation": 1_015_808,
            "slimpajama-heldout": 1_015_808,
            "pg19-validation": 3_000_000,
        },
        window_tokens={"slimpajama-heldout": 1_000_000},
    )
    student: Student = Student((5, 11, 17, 23))
    distillation: Distillation = Distillation()
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        if not isinstance(self.teacher, str) and self.texts.vocabulary is None:
            raise ValueError("vocabulary: expected a size for a teacher that is trained here, got none")
        if isinstance(self.teacher, Pretraining) and bool(self.teacher.drill_steps) != bool(self.texts.drills):
            raise ValueError(
                f"drill_steps: expected some if and only if there are drills, got {self.teacher.drill_steps} and "
                f"{self.texts.drills}"
            )

    @property
    def share_of_paper(self) -> float:
        """Tokens of both phases of distillation, as a fraction of the paper's."""
        return self.distillation.tokens / PAPER.distillation.tokens

    @property
    def tokenizer(self) -> str | int | None:
        """The checkpoint's own, by its name, or the size of one that is learned."""
        return self.teacher if isinstance(self.teacher, str) else self.texts.vocabulary


PAPER = RetrofitConfig()

CPU = RetrofitConfig(
    teacher=Pretraining(
        layers=4,
        num_heads=4,
        head_dim=32,
        train=TrainSettings(
            steps=3000,
            batch_size=8,
            learning_rate=1e-2,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            warmup=100,
            final_fraction=0.1,
        ),
        window=512,
        drill_steps=500,
        initializer_range=2 * 128**-0.5,
    ),
    texts=RetrofitTexts(
        train=("gutenberg/train", "needles:50000:gutenberg/train", "repeats:160000:2-60:gutenberg/train"),
        validation=("gutenberg/validation",),
        perplexity={
            "wikitext-103": ("wikitext-103/wiki.test.tokens",),
            "books": ("gutenberg/validation",),
        },
        drills=("repeats:50000:2-6:gutenberg/train",),
        vocabulary=4096,
        digits=3,
        words=("gutenberg/train", "needles:4000:gutenberg/train"),
        essays="PaulGrahamEssays.json",
        most_tokens={"books": 500_000},
    ),
    student=Student((1, 3), start="teacher", write_noise="gate"),
    distillation=Distillation(
        window=512,
        phase_a=Stage(200 * 8192, 8192),
        phase_b=PhaseBSchedule(Stage(200 * 8192, 8192), Stage(100 * 16384, 16384)),
        precision="fp32",
        rows_at_a_time=None,
        seed=1,
    ),
    evaluation=Evaluation(lengths=(512, 1024, 2048, 4096), samples=100),
)
"""A small Gated DeltaNet trained on books and on needles in short stretches of them; four lengths from its own on."""

SMOKE = replace(
    CPU,
    teacher=Pretraining(
        layers=2,
        num_heads=2,
        head_dim=8,
        train=TrainSettings(steps=4, batch_size=4, learning_rate=3e-3, warmup=1, final_fraction=0.1),
        window=256,
        drill_steps=1,
    ),
    texts=RetrofitTexts(
        train=("python-help:train", "needles:50:python-help:train"),
        validation=("python-help:validation",),
        perplexity={"python-help": ("python-help:validation",)},
        drills=("repeats:20:2-6:python-help:train",),
        vocabulary=512,
        words=("python-help:train",),
    ),
    student=Student((1,), start="teacher"),
    distillation=Distillation(
        window=256,
        phase_a=Stage(3 * 512, 512),
        phase_b=PhaseBSchedule(Stage(2 * 512, 512), Stage(2 * 1024, 1024), ramp=2),
        warmups=(1, 1),
        precision="fp32",
        rows_at_a_time=None,
        validation_windows=2,
    ),
    evaluation=Evaluation(lengths=(1024, 2048), samples=2, tasks=("niah_single_1", "niah_multivalue"), new_tokens=8),
)
"""Checks that the pipeline runs; its numbers are meaningless."""

PRESETS = {"smoke": SMOKE, "cpu": CPU, "paper": PAPER}
