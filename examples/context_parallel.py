"""Train a small hybrid on one long sequence whose tokens are split over processes, and compare it with one process.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel.py
    torchrun --standalone --nproc-per-node 4 examples/context_parallel.py --tokens 4096 --schedule scan

Every process holds its own tokens of the sequence and a replica of the model; DDP averages the gradients. The first
process then repeats the training by itself, on all tokens, and prints both losses, which agree to rounding.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from membydesign.models import MemoryConfig, MemoryForCausalLM, context_parallel

LAYERS = ["bayesian_layer", "attention", "gated_deltanet"]


def new_model() -> MemoryForCausalLM:
    """The same weights in every process."""
    torch.manual_seed(0)
    return MemoryForCausalLM(MemoryConfig(vocab_size=64, hidden_size=32, num_heads=2, head_dim=16, layers=LAYERS))


def sequence(step: int, tokens: int) -> torch.Tensor:
    """A sequence that repeats its first tokens, [1,T]: only a model that remembers predicts it."""
    first = torch.randint(64, (1, max(1, tokens // 8)), generator=torch.Generator().manual_seed(step))
    return first.repeat(1, 9)[:, :tokens]


def trained(model: torch.nn.Module, steps: int, tokens: int, own: slice) -> list[float]:
    """The loss of every step on the tokens of a slice."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        ids = sequence(step, tokens)[:, own]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train in all processes, then in the first alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="length of the whole sequence")
    parser.add_argument("--steps", type=int, default=5, help="optimiser steps")
    parser.add_argument("--schedule", choices=["auto", "scan", "pipeline"], default="auto", help="who waits for whom")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [arguments.tokens * r // size for r in range(size + 1)]
    model = context_parallel(new_model(), schedule=arguments.schedule).train()
    replica = DistributedDataParallel(model)
    losses = trained(replica, arguments.steps, arguments.tokens, slice(bounds[rank], bounds[rank + 1]))
    if rank == 0:
        alone = trained(new_model().train(), arguments.steps, arguments.tokens, slice(None))
        for step, (split, whole) in enumerate(zip(losses, alone, strict=True), 1):
            print(f"step {step}: loss {split:.5f} in {size} processes, {whole:.5f} in one")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
