"""The training loop: one function for one process or many."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from membydesign.data.seeds import seed_from
from membydesign.training import checkpoint
from membydesign.training.distributed import (
    accumulating,
    full_tensor,
    local_rows,
    make_accelerator,
    micro_batches,
    prepare,
    sum_over_processes,
)
from membydesign.training.identity import batch_digest, differences, plain
from membydesign.training.lock import locked
from membydesign.training.log import Log
from membydesign.training.signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor, nn

    from membydesign.training.distributed import Batch
    from membydesign.training.settings import TrainSettings


class Diverged(RuntimeError):
    """A loss or a gradient is not finite."""

    def __init__(self, step: int, what: str, value: float) -> None:
        super().__init__(step, what, value)  # all arguments, so that the exception can be pickled
        self.step, self.what, self.value = step, what, value

    def __str__(self) -> str:
        return f"step {self.step}: expected a finite {self.what}, got {self.value}; try a lower learning rate"


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as passed to `watch`.

    Attributes:
        step: optimiser steps done.
        steps: total optimiser steps.
        loss: mean loss since the last log entry; None if there is no loss.
        rate: steps per second.
        token_rate: tokens of `input_ids` per second over all processes; None if batches have no `input_ids`.
    """

    step: int
    steps: int
    loss: float | None
    rate: float
    token_rate: float | None = None


@dataclass(frozen=True)
class Ready:
    """Model and optimiser prepared for this process; created once for all stages of a run.

    Attributes:
        accelerator: Hugging Face accelerator.
        model: plain, replicated or sharded model.
        optimiser: optimiser of its parameters.
    """

    accelerator: Accelerator
    model: nn.Module
    optimiser: torch.optim.Optimizer


@dataclass(frozen=True)
class Trained:
    """Result of a run.

    Attributes:
        step: optimiser steps done.
        loss: mean loss of the last log entry.
        seconds: training time over all sessions of the run.
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
    multipliers: Mapping[str, float] | None = None,
    clip_groups: Callable[[str], str] | None = None,
    rows_at_a_time: int | None = None,
    accelerator: Accelerator | None = None,
) -> Trained:
    """Train a model in place.

    A step depends only on its number and the seed: `batch_of(step)` returns the global batch, of which each process
    takes its rows, and randomness within a step (dropout) is seeded by (seed, step, process). A run that was killed
    therefore resumes from its checkpoint to the same numbers.

    With a `directory`, Ctrl-C and SIGTERM take effect after the current step and save a checkpoint; a second Ctrl-C
    takes effect immediately. One process at a time may use the directory. A resumed run must have the settings and the
    data of the run that was started; only `log_every`, `save_every`, `rows_at_a_time`, the number of processes and,
    with `final_fraction=1`, `steps` may change.

    Args:
        model: model to train; under FSDP its parameters become shards.
        batch_of: function from a step to its batch, a dictionary of tensors whose first axis is the batch.
        losses_of: `losses_of(model, batch)` returns the losses of all targets of a batch, [N]; training minimises their
            mean over all processes. Leave out targets that should not count.
        settings: optimiser and schedule.
        seed: seed of the randomness within steps.
        directory: folder of log and checkpoints, from which an earlier session of the run is resumed; None to save
            nothing.
        until: step after which to stop with a checkpoint; None for the end of the run.
        watch: called after every step.
        multipliers: learning-rate multipliers by parameter name; the default is 1.
        clip_groups: function from a parameter's name to its group; the gradient of each group is clipped separately.
            None clips all gradients together.
        rows_at_a_time: rows per forward pass of each process, over which gradients are accumulated; None for all rows.
        accelerator: Hugging Face accelerator; None creates one.

    Raises:
        Diverged: if a loss or a gradient is not finite. The last checkpoint is kept.
        checkpoint.CheckpointError: if no checkpoint is intact, if one was written with other settings, data or another
            model, or if it cannot be written.
        lock.FolderInUse: if another process uses the directory.
    """
    return take_steps(
        make_ready(model, settings, multipliers, accelerator),
        batch_of,
        losses_of,
        settings,
        seed=seed,
        directory=directory,
        until=settings.steps if until is None else until,
        watch=watch,
        clip_groups=clip_groups,
        rows_at_a_time=rows_at_a_time,
    )


def make_ready(
    model: nn.Module,
    settings: TrainSettings,
    multipliers: Mapping[str, float] | None = None,
    accelerator: Accelerator | None = None,
) -> Ready:
    """Prepare a model and its optimiser for `take_steps`; takes the arguments of `train`."""
    accelerator = make_accelerator() if accelerator is None else accelerator
    return Ready(accelerator, *prepare(accelerator, model, lambda m: settings.optimiser(m, multipliers)))


def take_steps(
    ready: Ready,
    batch_of: Callable[[int], Batch],
    losses_of: Callable[[nn.Module, Batch], Tensor],
    settings: TrainSettings,
    *,
    seed: int,
    directory: Path | None,
    until: int,
    watch: Callable[[Progress], None],
    clip_groups: Callable[[str], str] | None,
    rows_at_a_time: int | None,
) -> Trained:
    """Take the steps of `train` from the last checkpoint on; same arguments and errors."""
    with locked(directory if ready.accelerator.is_main_process else None):
        return _take_steps(
            ready, batch_of, losses_of, settings, seed, directory, until, watch, clip_groups, rows_at_a_time
        )


def _take_steps(
    ready: Ready,
    batch_of: Callable[[int], Batch],
    losses_of: Callable[[nn.Module, Batch], Tensor],
    settings: TrainSettings,
    seed: int,
    directory: Path | None,
    until: int,
    watch: Callable[[Progress], None],
    clip_groups: Callable[[str], str] | None,
    rows_at_a_time: int | None,
) -> Trained:
    accelerator, prepared, stepper = ready.accelerator, ready.model, ready.optimiser
    inner = accelerator.unwrap_model(prepared)
    clipped = _groups(inner, clip_groups)
    identity = _identity(ready, settings, seed, clip_groups)

    def seeded_batch(step: int) -> Batch:
        torch.manual_seed(seed_from(repr((seed, step, accelerator.process_index))))
        return batch_of(step)

    place = _START if directory is None else _restore(directory, ready, settings, identity, seeded_batch)
    if place["step"] >= until:
        return Trained(place["step"], place["loss"], place["seconds"])
    prepared.train()
    log = Log(directory if accelerator.is_main_process else None, place["step"])
    started, before, last = time.perf_counter(), place["seconds"], place["loss"]
    total, counted, tokens = place["total"], place["counted"], 0
    first = place.get("data", {}).get("0")
    with HeldSignals(active=directory is not None) as signals:
        for step in range(place["step"], until):
            for group in stepper.param_groups:
                group["lr"] = settings.rate(step) * group["multiplier"]
            batch = seeded_batch(step)
            if step == 0 and directory is not None:
                first = batch_digest(batch)
            value = _gradients(
                accelerator, prepared, losses_of, micro_batches(local_rows(batch, accelerator), rows_at_a_time)
            )
            _finite(step, "loss", value)
            for group in clipped:
                norm = accelerator.clip_grad_norm_(group, float("inf") if settings.clip is None else settings.clip)
                _finite(step, "norm of the gradient", full_tensor(torch.as_tensor(norm)).item())
            stepper.step()
            stepper.zero_grad()
            total, counted = total + value, counted + 1
            tokens += batch["input_ids"].numel() if "input_ids" in batch else 0
            done, seconds = step + 1, time.perf_counter() - started
            speed = (done - place["step"]) / seconds
            watch(Progress(done, settings.steps, total / counted, speed, tokens / seconds if tokens else None))
            if done % settings.log_every == 0 or done == until:
                last, total, counted = total / counted, 0.0, 0
                log.write(step=done, loss=last, learning_rate=settings.rate(step), seconds=before + seconds)
            stop = signals.agreed(accelerator)
            if directory is not None and (done % settings.save_every == 0 or done == until or stop is not None):
                now = {"step": done, "loss": last, "seconds": before + seconds, "total": total, "counted": counted}
                data = {"0": first, str(step): batch_digest(batch)}
                now |= {"settings": identity, "data": {at: digest for at, digest in data.items() if digest}}
                log.sync()
                checkpoint.save(directory, inner, stepper, now, write=accelerator.is_main_process)
                accelerator.wait_for_everyone()
            if stop is not None:
                signals.deliver(stop)
    return Trained(until, last, before + time.perf_counter() - started)


_START: dict[str, Any] = {"step": 0, "loss": 0.0, "seconds": 0.0, "total": 0.0, "counted": 0}


def _identity(
    ready: Ready, settings: TrainSettings, seed: int, clip_groups: Callable[[str], str] | None
) -> dict[str, Any]:
    """Return what a resumed run must share with the run that was started, as JSON values."""
    multipliers = {id(p): group["multiplier"] for group in ready.optimiser.param_groups for p in group["params"]}
    named = list(ready.accelerator.unwrap_model(ready.model).named_parameters())
    trained = [(name, p) for name, p in named if id(p) in multipliers]
    return plain(
        {
            **settings.fixed(),
            "seed": seed,
            "precision": ready.accelerator.mixed_precision,
            "trained_parameters": sum(p.numel() for _, p in trained),
            "multipliers": {name: multipliers[id(p)] for name, p in trained if multipliers[id(p)] != 1},
            "clip_groups": {name: clip_groups(name) for name, _ in trained} if clip_groups else {},
        }
    )


def _restore(
    directory: Path,
    ready: Ready,
    settings: TrainSettings,
    identity: dict[str, Any],
    batch_of: Callable[[int], Batch],
) -> dict[str, Any]:
    """Load the newest intact checkpoint, if it belongs to the same run; return its position."""
    model, main = ready.accelerator.unwrap_model(ready.model), ready.accelerator.is_main_process
    if main:
        checkpoint.remove_partial(directory)
    stored = checkpoint.read(directory, report=main) if directory.exists() else None
    if stored is None:
        return _START
    checkpoint.check_fits(stored, model)
    place = stored.place
    # Checkpoints of version 0.1.0 have no settings and no digests of data.
    changed = differences(place["settings"], identity) if "settings" in place else ""
    if changed:
        raise checkpoint.CheckpointError(
            f"{directory}: expected the settings that this run was started with, got others ({changed}); resume with "
            "the stored settings, or choose another folder"
        )
    if place["step"] > settings.steps:
        raise checkpoint.CheckpointError(
            f"{directory}: steps: expected at least {place['step']}, which this run has done, got {settings.steps}; "
            "choose another folder for a shorter run"
        )
    for step, digest in place.get("data", {}).items() if main else ():
        if batch_digest(batch_of(int(step))) != digest:
            raise checkpoint.CheckpointError(
                f"{directory}: batch_of: expected the data that this run was started with, got another batch at step "
                f"{step}; resume with the same data, and a batch_of that depends on the step alone, or choose another "
                "folder"
            )
    checkpoint.put(stored, model, ready.optimiser)
    return place


def _groups(model: nn.Module, group_of: Callable[[str], str] | None) -> list[list[nn.Parameter]]:
    """Group the parameters whose gradients are clipped together."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(group_of(name) if group_of else "", []).append(parameter)
    return [*groups.values()]


def _gradients(
    accelerator: Accelerator,
    model: nn.Module,
    losses_of: Callable[[nn.Module, Batch], Tensor],
    batches: list[Batch],
) -> float:
    """Compute the gradient of the mean loss over all targets of all processes, and return that mean.

    The number of targets is known only after the last micro-batch. Until then every micro-batch is assumed to have as
    many as the first; if that was wrong, the gradients are rescaled at the end.
    """
    total, counted, assumed = 0.0, 0, 0.0
    for batch in accumulating(accelerator, model, batches):
        with accelerator.autocast():
            losses = losses_of(model, batch)
        if not assumed:
            first = torch.tensor(float(losses.numel()), device=losses.device)
            assumed = max(1.0, sum_over_processes(accelerator, first)) * len(batches)
        # Gradients are averaged over processes, so each process divides its sum by the global count.
        accelerator.backward(losses.sum() * (accelerator.num_processes / assumed))
        total, counted = total + losses.detach().double().sum(), counted + losses.numel()
    local = torch.tensor([float(total), float(counted)], device=accelerator.device)
    summed = accelerator.reduce(local, "sum")
    total, count = summed.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if count != assumed:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(assumed / max(1.0, count))
    return total / max(1.0, count)


def _finite(step: int, what: str, value: float) -> None:
    if not abs(value) < float("inf"):
        raise Diverged(step, what, value)
