"""Training in stages: the model is measured at milestones, each just once, however often the run is stopped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from membydesign.files import to_json, write_text
from membydesign.training.checkpoint import CheckpointError
from membydesign.training.loop import Trained, make_ready, take_steps
from membydesign.training.processes import gathered, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor, nn

    from membydesign.training.loop import Progress
    from membydesign.training.processes import Batch
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
    """Train a model as `train` does, and measure it on the way.

    Args:
        model: trained in place.
        batch_of: the batch of a step.
        losses_of: the losses of a batch.
        settings: optimiser and schedule.
        milestones: steps after which the model is measured; the last step always is.
        measure: `measure(step)`, what is found there, which JSON must hold. It is kept in a file, since a run that goes
            on from a checkpoint is past the milestones before it. All processes call it, and it may call the model or
            parts of it, also if the model is in shards.
        seed: of what is random within steps.
        directory: of log, checkpoint and measurements.
        watch: called after every step.
        multipliers: as of `train`; and the next three.
        clip_groups: the group of a parameter.
        rows_at_a_time: of each process.
        accelerator: of Hugging Face Accelerate.

    Returns:
        What the run came to, and what was measured, by step.
    """
    found, trained = measured(directory), None
    ready = make_ready(model, settings, multipliers, accelerator)
    for step in sorted({*milestones, settings.steps}):
        if str(step) in found and step < settings.steps:
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
                f"got one of step {trained.step}; remove this folder to start the run again"
            )
        if str(step) not in found:
            with gathered(ready.model), ready.accelerator.autocast():
                found[str(step)] = measure(step)
            if processes().is_main_process:
                write_text(directory / MEASURED, to_json(found))
    assert trained is not None
    return trained, found


def measured(directory: Path) -> dict[str, Any]:
    """What a run has measured so far, by step, also if it was stopped or diverged."""
    path = directory / MEASURED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
