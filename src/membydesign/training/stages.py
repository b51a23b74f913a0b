"""Training in stages: measure a model at milestones, each exactly once, even if the run is interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.files import read_object, to_json, write_text
from membydesign.training.checkpoint import CheckpointError
from membydesign.training.distributed import gathered, processes
from membydesign.training.lock import locked
from membydesign.training.loop import Trained, make_ready, take_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor, nn

    from membydesign.training.distributed import Batch
    from membydesign.training.loop import Progress
    from membydesign.training.settings import TrainSettings

MEASURED = "measured.json"


def train_in_stages(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    losses_of: Callable[[nn.Module, Batch], Tensor],
    settings: TrainSettings,
    *,
    milestones: Iterable[int],
    measure: Callable[[int], Any],
    seed: int,
    directory: Path,
    watch: Callable[[Progress], None] = lambda _: None,
    multipliers: Mapping[str, float] | None = None,
    clip_groups: Callable[[str], str] | None = None,
    rows_at_a_time: int | None = None,
    accelerator: Accelerator | None = None,
) -> tuple[Trained, dict[str, Any]]:
    """Train a model as `train` does, and measure it at milestones.

    Args:
        model: model to train.
        batch_of: function from a step to its batch.
        losses_of: function from model and batch to losses.
        settings: optimiser and schedule.
        milestones: steps after which the model is measured, in addition to the last step.
        measure: `measure(step)` returns the measurement as JSON values. It is saved, because a resumed run has already
            passed earlier milestones. All processes call it, and it may call the model or its submodules, even if the
            model is sharded.
        seed: seed of the randomness within steps.
        directory: folder of log, checkpoints and measurements.
        watch: called after every step.
        multipliers: learning-rate multipliers by parameter name, see `train`.
        clip_groups: groups of gradient clipping, see `train`.
        rows_at_a_time: rows per forward pass, see `train`.
        accelerator: Hugging Face accelerator; None creates one.

    Returns:
        The result of the run, and the measurements by step.
    """
    ready = make_ready(model, settings, multipliers, accelerator)
    with locked(directory if ready.accelerator.is_main_process else None):
        measurements, trained = measured(directory), None
        for step in sorted({*milestones, settings.steps}):
            if str(step) in measurements and step < settings.steps:
                continue
            trained = take_steps(
                ready,
                batch_of,
                losses_of,
                settings,
                seed=seed,
                directory=directory,
                until=step,
                watch=watch,
                clip_groups=clip_groups,
                rows_at_a_time=rows_at_a_time,
            )
            if trained.step != step:
                raise CheckpointError(
                    f"{directory}: expected a checkpoint of step {step} or before, which has not been measured yet, "
                    f"got one of step {trained.step}; remove this folder to restart the run"
                )
            if str(step) not in measurements:
                with gathered(ready.model), ready.accelerator.autocast():
                    measurements[str(step)] = measure(step)
                if processes().is_main_process:
                    write_text(directory / MEASURED, to_json(measurements))
        assert trained is not None
        return trained, measurements


def measured(directory: Path) -> dict[str, Any]:
    """Return the measurements of a run so far, by step, even if it was interrupted or diverged."""
    path = directory / MEASURED
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise CheckpointError(f"{error}; remove {directory} to restart the run") from error
