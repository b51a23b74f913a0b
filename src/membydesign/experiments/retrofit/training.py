"""Do the training runs of the retrofit: pretraining, both phases, the control. Each saves its model for the next."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from membydesign.data.token_files import TokenFile
from membydesign.data.tokenizer import bos_of, check_vocabulary, load_tokenizer
from membydesign.data.windows import Windows
from membydesign.experiments.shared.texts import TOKENIZER
from membydesign.layers import GatedDeltaNet
from membydesign.models import MemoryConfig, MemoryForCausalLM, fla_config, load_fla, next_token_losses
from membydesign.models.checkpoint import inspect
from membydesign.models.quiet import quiet
from membydesign.reports.provenance import commit
from membydesign.retrofit import (
    LossWeights,
    PhaseA,
    PhaseB,
    freeze,
    phase_a_losses,
    phase_a_mask,
    phase_b_loss,
    phase_b_mask,
    retrofit,
)
from membydesign.retrofit.replace import checked_places
from membydesign.training import (
    NextToken,
    SweepError,
    Trained,
    all_losses,
    make_accelerator,
    save_model,
    sharded,
    train_in_stages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from membydesign.experiments.retrofit.config import Distillation, Pretraining, Student
    from membydesign.training import Progress

MODEL = "model"
"""The folder of a run's model."""

DRILLS = "drills"
"""The token file with which pretraining begins."""

PRETRAINED, PHASE_A, HYBRID, CONTROL_A, CONTROL = "pretraining", "phase_a", "phase_b", "control_a", "control_b"
"""Names of runs."""


@dataclass(frozen=True)
class PretrainingRun:
    """Settings of the run that makes a teacher.

    Attributes:
        teacher: what it is.
        validation_windows: on which training is followed.
    """

    teacher: Pretraining
    validation_windows: int

    name = PRETRAINED


@dataclass(frozen=True)
class PhaseRun:
    """Settings of one phase of the student, or of the control.

    Attributes:
        name: of the run, one of `PHASE_A`, `HYBRID`, `CONTROL_A` and `CONTROL`.
        teacher: a checkpoint, or how it was trained.
        student: what is replaced by what.
        distillation: both phases.
    """

    name: str
    teacher: str | Pretraining
    student: Student
    distillation: Distillation

    @property
    def phase(self) -> str:
        """Its letter."""
        return self.name[-1]

    @property
    def is_control(self) -> bool:
        """Whether the model stays as it is and learns from text."""
        return self.name in (CONTROL_A, CONTROL)


class TeacherError(ValueError):
    """A teacher is missing, or its layers cannot be replaced."""


def load_model(source: str, what: str = "model") -> MemoryForCausalLM:
    """Load a model by its folder or its name on the Hub, flash-linear-attention's or ours, in float32.

    Args:
        source: folder or name.
        what: the model is, for errors.

    Raises:
        TeacherError: if it cannot be loaded.
    """
    quiet()
    try:
        name, kind = inspect(source, MemoryConfig.model_type)
        if kind == fla_config.MODEL_TYPE:
            return load_fla(source, dtype=torch.float32)
        return MemoryForCausalLM.from_pretrained(name, dtype=torch.float32)
    except SafetensorError as error:
        raise TeacherError(
            f"{what}: expected weights that can be read, got {source!r}: {error}; make or download them again"
        ) from error
    except (OSError, ValueError) as error:
        raise TeacherError(
            f"{what}: expected a Gated DeltaNet of flash-linear-attention's or a model of ours, by its folder or its "
            f"name on the Hugging Face Hub, got {source!r}: {error}"
        ) from error


def check_teacher(source: str, student: Student, words: PreTrainedTokenizerBase) -> None:
    """Check that the layers of a checkpoint can be replaced, and that its vocabulary covers its tokenizer.

    Raises:
        TeacherError: if not.
    """
    model = load_model(source, "teacher")
    try:
        checked_places(model, student.layers, GatedDeltaNet)
        check_vocabulary(words, model.config.vocab_size)
    except ValueError as error:
        raise TeacherError(f"teacher: expected another than {source}: {error}") from error


def load_teacher(teacher: str | Pretraining, runs: Path) -> MemoryForCausalLM:
    """Load the checkpoint, or the model of the pretraining run."""
    return load_model(teacher if isinstance(teacher, str) else str(runs / PRETRAINED / MODEL), "teacher").eval()


def work(config: PretrainingRun | PhaseRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train, measure and save a model; return the metrics of the run."""
    quiet()
    made_by = commit()
    if isinstance(config, PretrainingRun):
        trained, curve, model = _pretrain(config, directory, watch)
        tokens = config.teacher.train.steps * config.teacher.train.batch_size * config.teacher.window
    else:
        trained, curve, model = (_control if config.is_control else _distil)(config, directory, watch)
        both = config.distillation
        tokens = both.phase_a.tokens if config.phase == "a" else both.phase_b.tokens
    save_model(model, directory / MODEL, directory.parent.parent / "data" / TOKENIZER)
    return {
        "run": config.name,
        "weights": sum(p.numel() for p in model.parameters()),
        "trained_weights": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": trained.step,
        "tokens": tokens,
        "training_loss": trained.loss,
        "seconds": round(trained.seconds, 1),
        "validation": curve,
        "commit": made_by,
    }


def pretraining_batches(made: Pretraining, files: dict[str, TokenFile]) -> Callable[[int], dict[str, Tensor]]:
    """Return a function from step to batch: first windows of the drills, then of the text."""
    sources = [(Windows(files["train"], made.window, made.seed), made.drill_steps)]
    if made.drill_steps:
        sources.append((Windows(files[DRILLS], made.window, made.seed), 0))

    def batch(step: int) -> dict[str, Tensor]:
        windows, start = next(each for each in sources if step >= each[1])
        return {"input_ids": windows.batch(step - start, made.train.batch_size)}

    return batch


Result = tuple[Trained, dict[str, Any], MemoryForCausalLM]


def _pretrain(config: PretrainingRun, directory: Path, watch: Callable[[Progress], None]) -> Result:
    made = config.teacher
    files = _files(directory, *([DRILLS] if made.drill_steps else []))
    between = bos_of(
        load_tokenizer(directory.parent.parent / "data" / TOKENIZER)
    )  # the token between documents, so that it ends them
    torch.manual_seed(made.seed)
    model = MemoryForCausalLM(
        MemoryConfig(
            vocab_size=files["train"].vocab_size,
            hidden_size=made.num_heads * made.head_dim,
            num_hidden_layers=made.layers,
            layers="gated_deltanet",
            num_heads=made.num_heads,
            head_dim=made.head_dim,
            layer_options={"gated_deltanet": {"value_dim": made.head_dim}},
            initializer_range=made.initializer_range,
            bos_token_id=between,
            eos_token_id=between,
        )
    )
    model.model.embeddings.weight.data.mul_(made.embedding_range / made.initializer_range)
    trained, curve = train_in_stages(
        NextToken(model),
        pretraining_batches(made, files),
        all_losses,
        made.train,
        milestones=_milestones(made.train.steps),
        measure=lambda _: _cross_entropy(model, files["validation"], made.window, config.validation_windows),
        seed=made.seed,
        directory=directory,
        watch=watch,
    )
    return trained, curve, model


def _distil(config: PhaseRun, directory: Path, watch: Callable[[Progress], None]) -> Result:
    """Do Phase A from the teacher, or Phase B from the model of Phase A."""
    files, both = _files(directory), config.distillation
    accelerator = replicas(both)
    teacher = load_teacher(config.teacher, directory.parent).to(accelerator.device)
    replacement = config.student
    if config.phase == "a":
        student = retrofit(
            teacher,
            replacement.layers,
            transition=replacement.transition,
            convolution=replacement.convolution,
            start=replacement.start,
            write_noise=replacement.write_noise,
        )
        module: nn.Module = PhaseA(teacher, student)
    else:
        student = load_model(str(directory.parent / PHASE_A / MODEL)).to(accelerator.device)
        module = PhaseB(teacher, student, matched=replacement.matched)
    windows = Windows(files["train"], both.window, both.seed)

    def batch(step: int) -> dict[str, Tensor]:
        ids = windows.stretch(*both.stretch(config.phase, step))
        if config.phase == "a":
            return {"input_ids": ids}
        weights = both.phase_b.weights(step)
        return {"input_ids": ids, "weights": torch.tensor([[weights.kl, weights.boundary]]).expand(len(ids), 2)}

    @torch.no_grad()
    def measure(_step: int) -> dict[str, Any]:
        rows = [*_rows(files["validation"], both.window, both.validation_windows, accelerator.device)]
        if config.phase == "a":
            losses = [phase_a_losses(teacher, student, {"input_ids": ids}) for ids in rows]
            names = [str(i) for i in losses[0].layers]
            return {
                part: dict(zip(names, _means([getattr(one, part) for one in losses]), strict=True))
                for part in ("nmse", "cosine")
            }
        student.eval()
        losses = [
            phase_b_loss(teacher, student, {"input_ids": ids}, LossWeights(1, 0), matched=replacement.matched)
            for ids in rows
        ]
        names = [str(i) for i in losses[0].layers]
        student.train()
        return {
            "kl": mean(one.kl.mean().item() for one in losses),
            "nmse": dict(zip(names, _means([one.nmse for one in losses]), strict=True)),
        } | _cross_entropy(student, files["validation"], both.window, both.validation_windows)

    settings = both.settings(config.phase)
    trained, curve = train_in_stages(
        module,
        batch,
        all_losses,
        settings,
        milestones=_milestones(settings.steps),
        measure=measure,
        seed=both.seed,
        directory=directory,
        watch=watch,
        multipliers=module.multipliers if isinstance(module, PhaseB) else None,
        clip_groups=PhaseA.layer_of if config.phase == "a" else None,
        rows_at_a_time=both.rows_at_a_time,
        accelerator=accelerator,
    )
    return trained, curve, student


def _control(config: PhaseRun, directory: Path, watch: Callable[[Progress], None]) -> Result:
    """Train the teacher on: same tokens, masks and schedule, with cross-entropy as the loss."""
    files, both = _files(directory), config.distillation
    accelerator = replicas(both)
    if config.phase == "a":
        model = load_teacher(config.teacher, directory.parent)
        mask = phase_a_mask(model, config.student.layers)
    else:
        model = load_model(str(directory.parent / CONTROL_A / MODEL))
        mask = phase_b_mask(model, config.student.layers)
    freeze(model, mask)
    windows, settings = Windows(files["train"], both.window, both.seed), both.settings(config.phase)
    trained, curve = train_in_stages(
        NextToken(model),
        lambda step: {"input_ids": windows.stretch(*both.stretch(config.phase, step))},
        all_losses,
        settings,
        milestones=_milestones(settings.steps),
        measure=lambda _: _cross_entropy(model, files["validation"], both.window, both.validation_windows),
        seed=both.seed,
        directory=directory,
        watch=watch,
        multipliers={f"language_model.{name}": multiplier for name, multiplier in mask.items()},
        rows_at_a_time=both.rows_at_a_time,
        accelerator=accelerator,
    )
    return trained, curve, model


def replicas(both: Distillation) -> Accelerator:
    """Return an accelerator with replicas: the layers of a sharded model cannot be called by themselves."""
    accelerator = make_accelerator(both.precision)
    if sharded(accelerator):
        raise SweepError("fsdp: expected replicas for the retrofit (accelerate launch --multi_gpu), got shards")
    return accelerator


def _files(directory: Path, *more: str) -> dict[str, TokenFile]:
    folder = directory.parent.parent / "data"
    return {name: TokenFile(folder / f"{name}.safetensors") for name in ("train", "validation", *more)}


def _milestones(steps: int) -> list[int]:
    return [max(1, steps * i // 5) for i in range(1, 5)]


def _rows(tokens: TokenFile, window: int, count: int, device: torch.device) -> Iterator[Tensor]:
    """Yield windows for measuring, spread over a text, a few at a time."""
    step = max(1, len(tokens) // window // count)
    places = torch.arange(count) * step % (len(tokens) // window)
    return (tokens.rows(window, some).to(device) for some in places.split(4))


@torch.no_grad()
def _cross_entropy(model: MemoryForCausalLM, tokens: TokenFile, window: int, count: int) -> dict[str, float]:
    model.eval()
    device = next(model.parameters()).device
    losses = [next_token_losses(model, {"input_ids": ids}) for ids in _rows(tokens, window, count, device)]
    model.train()
    return {"cross_entropy": torch.cat(losses).mean().item()}


def _means(values: list[Tensor]) -> list[float]:
    """Average over rows, per layer: each [n,B]."""
    return torch.cat(values, 1).mean(1).tolist()
