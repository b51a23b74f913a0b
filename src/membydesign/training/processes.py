"""One process or many: who computes which rows, and where weights lie."""

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
"""How long processes wait for one another. Their backends give up after some minutes, but the first process may stream
and pack text for hours before the others find it made, and shares of an evaluation do not end at the same time."""


def processes() -> PartialState:
    """The processes that `accelerate launch` started together, of which this is one; or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=WAIT)


def make_accelerator(precision: Precision = "fp32") -> Accelerator:
    """Hugging Face Accelerate as `accelerate launch` asks for it, on CPUs where there is nothing else.

    Args:
        precision: of matrix products; "bf16" is mixed precision, with weights and filters in float32.
    """
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision: expected 'fp32' or 'bf16', got {precision!r}")
    mixed = "bf16" if precision == "bf16" else "no"
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()  # of an earlier run of this process; processes stay connected
    processes()  # connected before Accelerate does it, which would wait for a shorter time
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=mixed)
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None:
        # Accelerate would gather shards in bf16, of filters and losses too; the loop asks for autocast instead.
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
    return accelerator


def prepare(
    accelerator: Accelerator, model: nn.Module, optimiser_of: Callable[[nn.Module], torch.optim.Optimizer]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimiser, as this process sees them: whole, replicated (DDP) or in shards (FSDP).

    Accelerate does not shard on CPUs; if its launcher asks for that, we do, with the same `fully_shard` of torch. What
    is in shards already stays so.
    """
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("fsdp_version: expected 2 (`accelerate launch --fsdp_version 2`), got 1")
    if isinstance(model, FSDPModule):
        # Not by Accelerate again: it tells parameters by where their shards lie in memory, and empty ones lie nowhere.
        model.reshard()
        optimiser = optimiser_of(model)
        return model, optimiser if _sharded_by_us(accelerator) else accelerator.prepare_optimizer(optimiser)
    if _sharded_by_us(accelerator):
        _shard(model, accelerator.num_processes)
        return model, optimiser_of(model)
    prepared, stepper = accelerator.prepare(model, optimiser_of(model))
    return prepared, stepper


def sharded(accelerator: Accelerator) -> bool:
    """Whether processes hold shards of a model, and not the whole of it."""
    return accelerator.distributed_type == DistributedType.FSDP or _sharded_by_us(accelerator)


def _sharded_by_us(accelerator: Accelerator) -> bool:
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return asked and accelerator.distributed_type == DistributedType.MULTI_CPU


def _shard(model: nn.Module, processes: int) -> None:
    """Shard every block that Transformers would keep whole, and then the rest."""
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
    """Within this, any part of a prepared model may be called, also if it is in shards; all processes must take part.

    The forward pass of a sharded model gathers the weights that are of no block, and that of each block its own. So
    what calls parts of a model finds shards of embedding and head; here they are whole, and afterwards shards again.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first part that is called is taken for the whole model
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def whole(x: Tensor) -> Tensor:
    """A tensor of which this process may hold a shard; all processes must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, cut as a parameter is."""
    if isinstance(parameter, DTensor) and x.shape == parameter.shape:
        return distribute_tensor(x, parameter.device_mesh, parameter.placements)
    return x


def share(batch: Batch, accelerator: Accelerator) -> Batch:
    """The rows of a batch that belong to this process, where it computes."""
    rows = len(next(iter(batch.values())))
    if rows % accelerator.num_processes:
        raise ValueError(
            f"batch_size: expected a multiple of the {accelerator.num_processes} processes, got a batch of {rows}"
        )
    size = rows // accelerator.num_processes
    mine = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    return {name: x[mine].to(accelerator.device) for name, x in batch.items()}


def parts(batch: Batch, rows: int | None) -> list[Batch]:
    """A batch in parts of at most so many rows."""
    every = len(next(iter(batch.values())))
    if rows is None or rows >= every:
        return [batch]
    return [{name: x[start : start + rows] for name, x in batch.items()} for start in range(0, every, rows)]


def over_all(accelerator: Accelerator, x: Tensor) -> float:
    """The sum of a number over all processes."""
    return cast("Tensor", accelerator.reduce(x, "sum")).item()


def synchronised(accelerator: Accelerator, model: nn.Module, batches: list[Batch]) -> Iterator[Batch]:
    """Part after part; replicas exchange gradients after the last alone."""
    for part in batches[:-1]:
        with accelerator.no_sync(model):
            yield part
    yield batches[-1]
