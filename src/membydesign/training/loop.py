"""The training loop: one function, the same for one process and for many."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from membydesign.training import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from membydesign.training.settings import TrainSettings

    Batch = Mapping[str, Tensor]

LOG = "log.jsonl"


class Diverged(RuntimeError):
    """A loss or a gradient that is not finite."""

    def __init__(self, step: int, what: str, value: float) -> None:
        super().__init__(f"step {step}: expected a finite {what}, got {value}; try a lower learning rate")
        self.step = step


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever watches.

    Attributes:
        step: steps done.
        steps: of the whole run.
        loss: mean over the steps since the last report.
        rate: steps a second.
    """

    step: int
    steps: int
    loss: float
    rate: float


@dataclass(frozen=True)
class Trained:
    """What a run came to.

    Attributes:
        step: steps done.
        loss: mean over the last stretch of the log.
        seconds: of training, over all sessions of the run.
    """

    step: int
    loss: float
    seconds: float


def train(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    losses_of: Callable[[nn.Module, Batch], Tensor],
    settings: TrainSettings,
    *,
    seed: int,
    directory: Path | None = None,
    until: int | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
    accelerator: Accelerator | None = None,
) -> Trained:
    """Train a model in place.

    A step depends on its number and the seed alone: `batch_of(step)` gives the batch of all processes together, of
    which each takes its share of rows, and whatever is random within a step (dropout) is seeded by (seed, step,
    process). So a run that was killed goes on from its checkpoint to the same numbers.

    Args:
        model: trained in place.
        batch_of: the batch of a step, a dictionary of tensors whose first axis is the batch.
        losses_of: `losses_of(model, batch)`, the losses of all targets of a batch, [N]; their mean over all processes
            is what is descended.
        settings: optimiser and schedule.
        seed: of what is random within steps.
        directory: where log and checkpoint go, and where an earlier session of the same run left them; None for none.
        until: stop after this step, with a checkpoint; None for the end of the run.
        watch: called after every step.
        accelerator: of Hugging Face Accelerate; None makes one.

    Raises:
        Diverged: if a loss or a gradient is not finite. The last checkpoint stays as it was.
        checkpoint.CheckpointError: if the checkpoint cannot be read or does not fit.
    """
    accelerator = Accelerator() if accelerator is None else accelerator
    until = settings.steps if until is None else until
    optimiser = settings.optimiser(model)
    place = {"step": 0, "loss": 0.0, "seconds": 0.0} if directory is None else _restore(directory, model, optimiser)
    if place["step"] >= until:
        return Trained(place["step"], place["loss"], place["seconds"])
    prepared, stepper = accelerator.prepare(model, optimiser)
    prepared.train()
    log = _Log(directory if accelerator.is_main_process else None, place["step"])
    started, before, last = time.perf_counter(), place["seconds"], place["loss"]
    total, counted = 0.0, 0
    for step in range(place["step"], until):
        for group in optimiser.param_groups:
            group["lr"] = settings.rate(step)
        torch.manual_seed(_number(seed, step, accelerator.process_index))
        batch = {name: x.to(accelerator.device) for name, x in _share(batch_of(step), accelerator).items()}
        losses = losses_of(prepared, batch)
        count = _over_all(accelerator, torch.tensor(float(losses.numel()), device=losses.device))
        # Gradients are averaged over processes, so each gives its sum over the count of all.
        loss = losses.sum() * (accelerator.num_processes / count)
        accelerator.backward(loss)
        value = _over_all(accelerator, losses.detach().sum()) / count
        _finite(step, "loss", value)
        if settings.clip is not None:
            norm = accelerator.clip_grad_norm_(prepared.parameters(), settings.clip)
            _finite(step, "norm of the gradient", float(norm))  # pyright: ignore[reportArgumentType]
        stepper.step()
        stepper.zero_grad()
        total, counted = total + value, counted + 1
        done, seconds = step + 1, time.perf_counter() - started
        watch(Progress(done, settings.steps, total / counted, (done - place["step"]) / seconds))
        if done % settings.log_every == 0 or done == until:
            last, total, counted = total / counted, 0.0, 0
            log.write(step=done, loss=last, learning_rate=settings.rate(step), seconds=before + seconds)
        if directory is not None and (done % settings.save_every == 0 or done == until):
            now = {"step": done, "loss": last, "seconds": before + seconds}
            if accelerator.is_main_process:
                checkpoint.save(directory, accelerator.unwrap_model(prepared), optimiser, now)
            accelerator.wait_for_everyone()
    return Trained(until, last, before + time.perf_counter() - started)


def _restore(directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    return checkpoint.load(directory, model, optimiser) or {"step": 0, "loss": 0.0, "seconds": 0.0}


def _share(batch: Batch, accelerator: Accelerator) -> Batch:
    """The rows of a batch that belong to this process."""
    if accelerator.num_processes == 1:
        return batch
    rows = len(next(iter(batch.values())))
    if rows % accelerator.num_processes:
        raise ValueError(
            f"batch_size: expected a multiple of the {accelerator.num_processes} processes, got a batch of {rows}"
        )
    size = rows // accelerator.num_processes
    mine = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    return {name: x[mine] for name, x in batch.items()}


def _over_all(accelerator: Accelerator, x: Tensor) -> float:
    """The sum of a number over all processes."""
    return accelerator.reduce(x, "sum").item()  # pyright: ignore[reportAttributeAccessIssue]


def _number(*parts: int) -> int:
    """One seed of several numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _finite(step: int, what: str, value: float) -> None:
    if not abs(value) < float("inf"):
        raise Diverged(step, what, value)


class _Log:
    """A log of JSON lines; what was written after the checkpoint that a run resumes from is dropped."""

    def __init__(self, directory: Path | None, step: int) -> None:
        self.path = None if directory is None else directory / LOG
        if self.path is not None and self.path.exists():
            kept = [
                line
                for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True)
                if line.endswith("\n") and json.loads(line)["step"] <= step
            ]
            self.path.write_text("".join(kept), encoding="utf-8")

    def write(self, **line: float) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
