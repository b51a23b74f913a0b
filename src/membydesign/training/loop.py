"""The training loop: one function, the same for one process and for many."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from membydesign.files import write_text
from membydesign.training import checkpoint
from membydesign.training.processes import make_accelerator, over_all, parts, prepare, share, synchronised, whole
from membydesign.training.signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor, nn

    from membydesign.training.processes import Batch
    from membydesign.training.settings import TrainSettings

LOG = "log.jsonl"


class Diverged(RuntimeError):
    """A loss or a gradient that is not finite."""

    def __init__(self, step: int, what: str, value: float) -> None:
        super().__init__(step, what, value)  # all of them, so that other processes can send it
        self.step, self.what, self.value = step, what, value

    def __str__(self) -> str:
        return f"step {self.step}: expected a finite {self.what}, got {self.value}; try a lower learning rate"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever watches.

    Attributes:
        step: steps done.
        steps: of the whole run.
        loss: mean over the steps since the last report; None for steps without one.
        rate: steps a second.
        token_rate: tokens of `input_ids` a second, over all processes; None if batches have none.
    """

    step: int
    steps: int
    loss: float | None
    rate: float
    token_rate: float | None = None


@dataclass(frozen=True)
class Ready:
    """What takes steps, as this process has it; made once for all stages of a run.

    Attributes:
        accelerator: of Hugging Face Accelerate.
        model: whole, replicated or in shards.
        optimiser: of its parameters.
    """

    accelerator: Accelerator
    model: nn.Module
    optimiser: torch.optim.Optimizer


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
    multipliers: Mapping[str, float] | None = None,
    clip_groups: Callable[[str], str] | None = None,
    rows_at_a_time: int | None = None,
    accelerator: Accelerator | None = None,
) -> Trained:
    """Train a model in place.

    A step depends on its number and the seed alone: `batch_of(step)` gives the batch of all processes together, of
    which each takes its share of rows, and whatever is random within a step (dropout) is seeded by (seed, step,
    process). So a run that was killed goes on from its checkpoint to the same numbers.

    With a `directory`, Ctrl-C and SIGTERM take effect after the step under way, with a checkpoint; Ctrl-C pressed again
    takes effect at once.

    Args:
        model: trained in place; under FSDP its parameters become shards.
        batch_of: the batch of a step, a dictionary of tensors whose first axis is the batch.
        losses_of: `losses_of(model, batch)`, the losses of all targets of a batch, [N]; their mean over all processes
            is what is descended. Targets that shall not count are left out.
        settings: optimiser and schedule.
        seed: of what is random within steps.
        directory: where log and checkpoints go, and where an earlier session of the same run left them; None for none.
        until: stop after this step, with a checkpoint; None for the end of the run.
        watch: called after every step.
        multipliers: by names of parameters, of their learning rates; 1 for those not named.
        clip_groups: the group of a parameter, by its name; gradients of different groups are clipped apart. None clips
            all of them together.
        rows_at_a_time: of each process; gradients are accumulated over its share of a batch. None for the whole share.
        accelerator: of Hugging Face Accelerate; None makes one.

    Raises:
        Diverged: if a loss or a gradient is not finite. The last checkpoint stays as it was.
        checkpoint.CheckpointError: if a checkpoint cannot be read, does not fit, or cannot be written.
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
    """A model with its optimiser, ready for `take_steps`; arguments as of `train`."""
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
    """The steps of `train`, from the last checkpoint on; arguments and errors are its own."""
    accelerator, prepared, stepper = ready.accelerator, ready.model, ready.optimiser
    inner = accelerator.unwrap_model(prepared)
    clipped = _groups(inner, clip_groups)
    place = _START if directory is None else _restore(directory, inner, stepper)
    if place["step"] >= until:
        return Trained(place["step"], place["loss"], place["seconds"])
    prepared.train()
    log = _Log(directory if accelerator.is_main_process else None, place["step"])
    started, before, last = time.perf_counter(), place["seconds"], place["loss"]
    total, counted, tokens = place.get("total", 0.0), place.get("counted", 0), 0
    with HeldSignals(active=directory is not None) as signals:
        for step in range(place["step"], until):
            for group in stepper.param_groups:
                group["lr"] = settings.rate(step) * group["multiplier"]
            torch.manual_seed(_number(seed, step, accelerator.process_index))
            batch = batch_of(step)
            value = _gradients(accelerator, prepared, losses_of, parts(share(batch, accelerator), rows_at_a_time))
            _finite(step, "loss", value)
            for group in clipped:
                norm = accelerator.clip_grad_norm_(group, float("inf") if settings.clip is None else settings.clip)
                _finite(step, "norm of the gradient", whole(torch.as_tensor(norm)).item())
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
                checkpoint.save(directory, inner, stepper, now, write=accelerator.is_main_process)
                accelerator.wait_for_everyone()
            if stop is not None:
                signals.deliver(stop)
    return Trained(until, last, before + time.perf_counter() - started)


_START: dict[str, Any] = {"step": 0, "loss": 0.0, "seconds": 0.0}


def _restore(directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    return checkpoint.load(directory, model, optimiser) or _START


def _groups(model: nn.Module, group_of: Callable[[str], str] | None) -> list[list[nn.Parameter]]:
    """The parameters whose gradients are clipped together."""
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
    """Leave the gradient of the mean loss over all targets of all processes in the parameters; returns that mean.

    How many targets there are is known when the last part has been seen. Until then every part is taken to have as
    many as the first, and in the end gradients are rescaled if that was not so.
    """
    total, counted, assumed = 0.0, 0, 0.0
    for batch in synchronised(accelerator, model, batches):
        with accelerator.autocast():
            losses = losses_of(model, batch)
        if not assumed:
            first = torch.tensor(float(losses.numel()), device=losses.device)
            assumed = max(1.0, over_all(accelerator, first)) * len(batches)
        # Gradients are averaged over processes, so each gives its sum over the count of all.
        accelerator.backward(losses.sum() * (accelerator.num_processes / assumed))
        total, counted = total + losses.detach().double().sum(), counted + losses.numel()
    found = torch.tensor([float(total), float(counted)], device=accelerator.device)
    both = accelerator.reduce(found, "sum")
    total, count = both.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if count != assumed:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(assumed / max(1.0, count))
    return total / max(1.0, count)


def _number(*parts: int) -> int:
    """One seed of several numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _finite(step: int, what: str, value: float) -> None:
    if not abs(value) < float("inf"):
        raise Diverged(step, what, value)


def _step_of(line: str) -> float:
    """Of a line of the log; infinite if a crash has garbled it."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


class _Log:
    """A log of JSON lines; what was written after the checkpoint that a run resumes from is dropped."""

    def __init__(self, directory: Path | None, step: int) -> None:
        self.path = None if directory is None else directory / LOG
        if self.path is not None and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
            if kept != lines:
                write_text(self.path, "".join(kept))

    def write(self, **line: float) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
