"""What two processes check of models that are sharded; `test_sharded_models.py` runs it."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from membydesign.models import MemoryConfig, MemoryForCausalLM, tensor_parallel

MESH = init_device_mesh("cpu", (2,))
STEPS = 3


def model_of(**options: Any) -> MemoryForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 4}
    return MemoryForCausalLM(MemoryConfig(**{**sizes, **options})).train()


def batch(step: int) -> torch.Tensor:
    return torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(step))


def trained(model: MemoryForCausalLM, rows: slice = slice(None)) -> list[float]:
    """The losses of a few steps, over all rows."""
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        ids = batch(step)[rows]
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def same_weights(model: MemoryForCausalLM, alone: MemoryForCausalLM) -> None:
    for (name, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(x, DTensor), name
        assert torch.allclose(x.full_tensor(), y, atol=2e-4), (name, (x.full_tensor() - y).abs().max())


def tensor_parallel_equals_one_process(**options: Any) -> None:
    alone: Any = model_of(**options)
    model: Any = tensor_parallel(copy.deepcopy(alone), MESH)
    mixer = model.model.layers[0].mixer
    assert mixer.v_proj.weight.to_local().shape[0] * 2 == alone.model.layers[0].mixer.v_proj.weight.shape[0]
    assert trained(model) == pytest.approx(trained(alone), abs=1e-4)
    same_weights(model, alone)
    ids = batch(9)[:1]
    made = [x.eval().generate(ids, max_new_tokens=5, do_sample=False) for x in (model, alone)]
    assert torch.equal(*made)


def check_tensor_parallel() -> None:
    tensor_parallel_equals_one_process()


def check_tensor_parallel_with_convolutions_and_tied_weights() -> None:
    options = {"bayesian_layer_rotating": {"short_convolution": 3, "output_gate": False}}
    layers = ["bayesian_layer_rotating", "attention"]
    tensor_parallel_equals_one_process(layers=layers, layer_options=options, tie_word_embeddings=True)


def check_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh: expected a divisor of the 3 heads of model.layers.0.mixer, got 2"):
        tensor_parallel(model_of(num_heads=3), MESH)


def check_fully_shard() -> None:
    alone = model_of()
    model = copy.deepcopy(alone)
    for block in model.model.layers:
        fully_shard(block, mesh=MESH)
    fully_shard(model, mesh=MESH)
    rank = torch.distributed.get_rank()
    own = torch.tensor(trained(model, slice(2 * rank, 2 * rank + 2)))
    torch.distributed.all_reduce(own)
    assert (own / 2).tolist() == pytest.approx(trained(alone), abs=1e-4)
    same_weights(model, alone)


def check_a_batch_that_is_sharded() -> None:
    alone = model_of()
    model = distribute_module(copy.deepcopy(alone), MESH)
    ids = batch(0)
    with torch.no_grad():
        logits = model(distribute_tensor(ids, MESH, [Shard(0)])).logits
        assert torch.allclose(logits.full_tensor(), alone(ids).logits, atol=1e-4)
