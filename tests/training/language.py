"""A small language model of Bayesian Layers and data of its own, that other processes can import."""

import torch
from torch import nn

from membydesign.data.seeds import generator
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.training import TrainSettings

SETTINGS = TrainSettings(
    steps=20,
    batch_size=4,
    learning_rate=1e-2,
    weight_decay=0.1,
    warmup=5,
    final_fraction=0.1,
    log_every=1,
    save_every=5,
)


def model(seed: int = 0) -> MemoryForCausalLM:
    torch.manual_seed(seed)
    return MemoryForCausalLM(
        MemoryConfig(
            vocab_size=31, hidden_size=16, layers="bayesian_layer", num_hidden_layers=2, num_heads=2, head_dim=8
        )
    )


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(31, (4, 12), generator=generator("language", "train", step))}


def losses_of(model: nn.Module, batch) -> torch.Tensor:
    """The first token of every third sequence is not a target, so that processes have different numbers of them."""
    ids = batch["input_ids"]
    losses = nn.functional.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses[ids[:, 1:] > 2]
