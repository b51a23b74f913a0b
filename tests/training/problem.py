"""A small model with dropout and data of its own, and a sweep over it that other processes can import."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from membydesign.data.seeds import generator
from membydesign.training import Run, TrainSettings, sweep, train


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.dropout(torch.tanh(self.norm(self.embedding(x)))))


def model(seed: int = 0, dropout: float = 0.0) -> Small:
    torch.manual_seed(seed)
    return Small(dropout)


def batch_of(step: int, size: int = 8) -> dict[str, torch.Tensor]:
    x = torch.randn(size, 5, 6, generator=generator("small", "train", step))
    return {"x": x, "y": x.sum(-1).sign().long() + 1}


def losses_of(model: nn.Module, batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")


SETTINGS = TrainSettings(
    steps=40, batch_size=8, learning_rate=1e-2, weight_decay=0.1, clip=0.5, warmup=5, final_fraction=0.1, log_every=4,
    save_every=7,
)  # fmt: skip


@dataclass(frozen=True)
class SmallRun:
    seed: int
    train: TrainSettings = SETTINGS


def work(config: SmallRun, directory: Path, watch) -> dict:
    small = model(config.seed, dropout=0.2)
    done = train(small, batch_of, losses_of, config.train, seed=config.seed, directory=directory, watch=watch)
    return {"loss": done.loss, "weights": [p.double().sum().item() for p in small.parameters()]}


def runs(steps: int, seeds: int = 3) -> list[Run]:
    settings = TrainSettings(steps=steps, batch_size=8, learning_rate=1e-2, log_every=10, save_every=13)
    return [Run(f"seed{seed}", SmallRun(seed, settings), work) for seed in range(seeds)]


if __name__ == "__main__":  # python problem.py FOLDER STEPS WORKERS
    sweep(runs(int(sys.argv[2])), Path(sys.argv[1]), workers=int(sys.argv[3]))
