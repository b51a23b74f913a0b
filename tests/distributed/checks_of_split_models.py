"""What processes check of models whose tokens are split over them; `test_stretches.py` runs it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import membydesign as mbd
from distributed.stretches import close, own_part
from membydesign.models import MemoryConfig, MemoryForCausalLM, context_parallel

SIZE, RANK = dist.get_world_size(), dist.get_rank()
GROUP = dist.new_group()
LENGTHS = {2: (9, 7), 4: (5, 2, 6, 3)}[SIZE]
HYBRID = ["bayesian_layer", "attention", "gated_deltanet", "partial_reset"]
OPTIONS = {"bayesian_layer": {"short_convolution": 3}}


def model_of(layers: list[str] = HYBRID, **options: Any) -> MemoryForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_heads": 2, "head_dim": 8}
    own = {name: OPTIONS[name] for name in layers if name in OPTIONS}
    return MemoryForCausalLM(MemoryConfig(layers=layers, layer_options=own, **{**sizes, **options})).train()


def batch(step: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(32, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(step))


def trained(model: Any, steps: int, lengths: tuple[int, ...] | None, average: bool = False) -> list[float]:
    """The losses of a few steps; `lengths` says which tokens are whose, `average` averages gradients by hand."""
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        ids = batch(step)
        ids = ids if lengths is None else own_part(ids, lengths)
        loss = model(ids, labels=ids).loss
        loss.backward()
        for parameter in model.parameters() if average else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= SIZE
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trains_as_one_process(prepare: Any, steps: int, average: bool = False, schedule: Any = "auto") -> None:
    alone: Any = model_of()
    model = context_parallel(copy.deepcopy(alone), GROUP, schedule)
    prepared = prepare(model)
    assert trained(prepared, steps, LENGTHS, average) == pytest.approx(trained(alone, steps, None), abs=1e-4)
    for (name, x), y in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        close(full(x), y[1], 1e-3, name)


def check_twenty_steps() -> None:
    trains_as_one_process(lambda model: model, 20, average=True)


def check_a_scan() -> None:
    trains_as_one_process(lambda model: model, 3, average=True, schedule="scan")


def check_ddp() -> None:
    trains_as_one_process(DistributedDataParallel, 3)


def check_fsdp() -> None:
    mesh = init_device_mesh("cpu", (SIZE,))

    def shard(model: Any) -> Any:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    trains_as_one_process(shard, 3)


def check_gradient_checkpointing() -> None:
    def prepare(model: Any) -> Any:
        model.gradient_checkpointing_enable()
        return model

    trains_as_one_process(prepare, 2, average=True)


def check_packed_loss_and_gradients() -> None:
    """In float64, from logits; the loss that Transformers computes from them is float32."""
    cu_seqlens = torch.tensor([0, 4, 11, 16])
    alone: Any = model_of().double()
    model: Any = context_parallel(copy.deepcopy(alone), GROUP)
    ids = batch(0, rows=1)
    expected = alone(ids, labels=ids, cu_seqlens=cu_seqlens)
    own = own_part(ids, LENGTHS)
    out = model(own, labels=own, cu_seqlens=cu_seqlens)
    close(out.logits, own_part(expected.logits, LENGTHS), 1e-9, "logits")
    close(out.loss, expected.loss, 1e-6, "loss")
    weight = torch.randn(expected.logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out.logits * own_part(weight, LENGTHS)).sum().backward()
    (expected.logits * weight).sum().backward()
    for (name, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(x.grad)
        close(x.grad, y.grad, 1e-9, name)


def check_a_stretch_for_one_call() -> None:
    model = model_of(["bayesian_layer"]).eval()
    ids = own_part(batch(0), LENGTHS)
    with torch.no_grad():
        stretch = mbd.Stretch.of(ids, group=GROUP)
        logits = model(ids, stretch=stretch).logits
        close(logits, own_part(model(batch(0)).logits, LENGTHS), 1e-5, "logits")


def check_refusals() -> None:
    model: Any = context_parallel(model_of(["bayesian_layer"]), GROUP)
    ids = own_part(batch(0), LENGTHS)
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    for options, match in (
        ({"use_cache": True}, "use_cache: expected False where tokens are split over processes, got True"),
        ({"attention_mask": mask}, "attention_mask: expected no padding"),
        ({"position_ids": torch.zeros_like(ids)}, "position_ids: expected None"),
    ):
        with pytest.raises(ValueError, match=match):
            model(ids, **options)
    with pytest.raises(ValueError, match=r"got layer 1 \(hyena\), since Hyena"):
        context_parallel(model_of(["bayesian_layer", "hyena"]), GROUP)
    with pytest.raises(ValueError, match="schedule: expected"):
        context_parallel(model_of(["bayesian_layer"]), GROUP, "sometimes")  # pyright: ignore[reportArgumentType]
