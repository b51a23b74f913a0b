"""Training in one process or many: which process computes which rows and holds which weights."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    Batch = Mapping[str, Tensor]
    Precision = Literal["fp32", "bf16"]

WAIT = timedelta(hours=24)
"""Timeout of processes that wait for one another. The backends' default is a few minutes, but the first process may
tokenise text for hours while the others wait, and parts of an evaluation finish at different times."""


def processes() -> PartialState:
    """Return the state of the processes that `accelerate launch` started together, or of this single process."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=WAIT)


def make_accelerator(precision: Precision = "fp32") -> Accelerator:
    """Create an accelerator as `accelerate launch` configures it, on the CPU if there is no GPU.

    Args:
        precision: precision of matrix products; "bf16" is mixed precision, with weights and filters in float32.
    """
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision: expected 'fp32' or 'bf16', got {precision!r}")
    mixed = "bf16" if precision == "bf16" else "no"
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()  # left by an earlier run in this process; processes stay connected
    processes()  # connect before Accelerate does, whose timeout is shorter
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=mixed)
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None:
        # Accelerate would gather shards in bf16, even for filters and losses; the loop uses autocast instead.
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
    return accelerator


def prepare(
    accelerator: Accelerator, model: nn.Module, optimiser_of: Callable[[nn.Module], torch.optim.Optimizer]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model and its optimiser for this process: plain, replicated (DDP) or sharded (FSDP).

    Accelerate does not shard on CPUs; if its launcher requests that, this function calls torch's `fully_shard` itself.
    A model that is already sharded stays as it is.
    """
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("fsdp_version: expected 2 (`accelerate launch --fsdp_version 2`), got 1")
    if isinstance(model, FSDPModule):
        # Accelerate must not prepare it again: it identifies parameters by the memory address of their shards, and
        # empty shards have none.
        model.reshard()
        optimiser = optimiser_of(model)
        return model, optimiser if _sharded_by_us(accelerator) else accelerator.prepare_optimizer(optimiser)
    if _sharded_by_us(accelerator):
        _shard(model, accelerator.num_processes)
        return model, optimiser_of(model)
    prepared, stepper = accelerator.prepare(model, optimiser_of(model))
    return prepared, stepper


def sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds only shards of the model."""
    return accelerator.distributed_type == DistributedType.FSDP or _sharded_by_us(accelerator)


def _sharded_by_us(accelerator: Accelerator) -> bool:
    requested = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return requested and accelerator.distributed_type == DistributedType.MULTI_CPU


def _shard(model: nn.Module, processes: int) -> None:
    """Shard every block that Transformers must not split, and then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (processes,))
    blocks = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Allow calls of single submodules of a prepared model, even if it is sharded; all processes must take part.

    The forward pass of a sharded model gathers the weights outside of blocks, and that of each block its own. Code that
    calls submodules directly would see shards of embedding and head; inside this context they are gathered.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # otherwise the first submodule called becomes the root
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def full_tensor(x: Tensor) -> Tensor:
    """Gather a tensor of which this process may hold a shard; all processes must call this function."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Shard a full tensor in the same way as a parameter."""
    if isinstance(parameter, DTensor) and x.shape == parameter.shape:
        return distribute_tensor(x, parameter.device_mesh, parameter.placements)
    return x


def local_rows(batch: Batch, accelerator: Accelerator) -> Batch:
    """Return this process's rows of a batch, on its device."""
    rows = len(next(iter(batch.values())))
    if rows % accelerator.num_processes:
        raise ValueError(
            f"batch_size: expected a multiple of the {accelerator.num_processes} processes, got a batch of {rows}"
        )
    size = rows // accelerator.num_processes
    mine = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    return {name: x[mine].to(accelerator.device) for name, x in batch.items()}


def micro_batches(batch: Batch, rows: int | None) -> list[Batch]:
    """Split a batch into micro-batches of at most `rows` rows; None for no limit."""
    total = len(next(iter(batch.values())))
    if rows is None or rows >= total:
        return [batch]
    return [{name: x[start : start + rows] for name, x in batch.items()} for start in range(0, total, rows)]


def sum_over_processes(accelerator: Accelerator, x: Tensor) -> float:
    """Sum a number over all processes."""
    return cast("Tensor", accelerator.reduce(x, "sum")).item()


def accumulating(accelerator: Accelerator, model: nn.Module, batches: list[Batch]) -> Iterator[Batch]:
    """Iterate over micro-batches; replicas exchange gradients only after the last one."""
    for batch in batches[:-1]:
        with accelerator.no_sync(model):
            yield batch
    yield batches[-1]
