"""`accelerate launch launched.py WHAT FILE FOLDER`: a model is trained, and the first process writes what came out.

WHAT is "plain", a model whose training is stopped and goes on in the same processes; "stages", one that is measured on
the way; "killed" and "stopped", the same, where one process gets SIGKILL or SIGTERM after step 12; or "bf16", one in
mixed precision.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from membydesign.models import next_token_losses
from membydesign.training import NextToken, all_losses, make_accelerator, save_model, train, train_in_stages
from training.language import SETTINGS, batch_of, losses_of, model

MILESTONES = (4, 8, 15)
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}


def plain(folder: Path, accelerator):
    """Losses of all steps; the run as it was at step 10 stays beside it."""
    losses, made = [], model()
    for until in (10, None):
        train(
            made,
            batch_of,
            losses_of,
            SETTINGS,
            seed=0,
            directory=folder,
            until=until,
            rows_at_a_time=1,
            accelerator=accelerator,
            watch=lambda p: losses.append(p.loss),
        )
        if until and accelerator.is_main_process:
            shutil.copytree(folder, folder.with_name("at-10"))
    return made, {"losses": losses}


def stages(folder: Path, accelerator, number: int | None = None):
    """What is measured, through the module that is trained and through the language model within it."""
    made = NextToken(model())
    ids = batch_of(1000)["input_ids"]

    @torch.no_grad()
    def measure(step: int):
        part = next_token_losses(made.language_model, {"input_ids": ids})
        return {"module": made(ids).mean().item(), "part": part.mean().item()}

    def watch(progress):
        last = accelerator.process_index == accelerator.num_processes - 1
        if number is not None and progress.step == 12 and last:
            os.kill(os.getpid(), number)

    _, found = train_in_stages(
        made,
        batch_of,
        all_losses,
        SETTINGS,
        milestones=MILESTONES,
        measure=measure,
        seed=0,
        directory=folder,
        rows_at_a_time=1,
        accelerator=accelerator,
        watch=watch,
    )
    save_model(made.language_model, folder.with_name("model"))
    return made, {"measured": found}


def types(accelerator):
    """Which types there are on the way through a model that is trained in mixed precision."""
    made, found = NextToken(model()), {}
    mixer: Any = made.language_model.model.layers[0].mixer

    def losses_of(prepared, batch):
        losses = all_losses(prepared, batch)
        found["losses"] = str(losses.dtype)
        return losses

    mixer.q_proj.register_forward_hook(lambda _m, _x, y: found.update(maps=str(y.dtype)))
    mixer.register_forward_hook(lambda _m, _x, y: found.update(filters=str(y[1].memory.mean.dtype)))
    train(made, batch_of, losses_of, SETTINGS, seed=0, until=2, accelerator=accelerator)
    return made, {**found, "weights": sorted({str(p.dtype) for p in made.parameters()})}


def shard_by_accelerate(precision) -> None:
    """Have Accelerate shard the model on CPUs, as it does on GPUs alone."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    make_accelerator(precision)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if precision == "bf16":
        plugin.set_mixed_precision("bf16")
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)


def patience() -> float:
    """Seconds that the processes wait for one another."""
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


if __name__ == "__main__":
    what, file, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    asked: Any = os.environ["PRECISION"]
    if "SHARD_BY_ACCELERATE" in os.environ:
        shard_by_accelerate(asked)
    launched = make_accelerator(asked)
    if what == "bf16":
        done, result = types(launched)
    elif what == "plain":
        done, result = plain(directory, launched)
    else:
        done, result = stages(directory, launched, SIGNALS.get(what))
    if launched.is_main_process:
        about = {
            "processes": launched.num_processes,
            "sharded": all(isinstance(p, DTensor) for p in done.parameters()),
            "patience": patience(),
        }
        file.write_text(json.dumps({**about, **result}))
