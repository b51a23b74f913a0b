"""The learned tasks: one layer of memory whose keys are inputs, trained to recall."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.data.recall import Collisions, RandomKeys
from membydesign.data.seeds import generator
from membydesign.design import catalogue
from membydesign.experiments.compare.sizes import Fit, most_keys, most_values
from membydesign.experiments.shared.addressed import losses
from membydesign.layers import MemoryLayer
from membydesign.models.modeling import SwiGLU
from membydesign.training import TrainSettings, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from membydesign.data.recall import Addressed
    from membydesign.design import Design
    from membydesign.training import Progress

SHARPNESS = 8.0
"""Where keys are weights, they are softmax(s · address); s is learned from this value on."""


class GivenKeys(nn.Module):
    """Takes the place of a layer's map to keys or queries: returns the addresses that `addresses` holds."""

    def __init__(self, heads: int, *, weights: bool) -> None:
        super().__init__()
        self.heads, self.addresses = heads, torch.empty(0)
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(SHARPNESS))) if weights else None

    def forward(self, x: Tensor) -> Tensor:
        """Ignore x, [B,T,hidden_size]; return the same address for every head, [B,T,H·D]."""
        del x
        sharpness = 1.0 if self.log_sharpness is None else self.log_sharpness.exp()
        return (sharpness * self.addresses).repeat(1, 1, self.heads)


class RecallModel(nn.Module):
    """One pre-norm layer of memory and SwiGLU, read at the queries that end each sequence.

    Values, gates and noises come from the stream as in any `MemoryLayer`; keys and queries are the addresses.

    Args:
        design: of the memory.
        sizes: of the memory.
        token_dim: the size of a token.
        labels: of the answer.
        hidden_size: the width of the stream.
        heads: H.
    """

    def __init__(
        self, design: Design, sizes: Fit, token_dim: int, labels: int, *, hidden_size: int = 64, heads: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(token_dim, hidden_size)
        self.memory = MemoryLayer(design, hidden_size, heads, sizes.D, value_dim=sizes.M)
        weights = design.key_bound != "finite"
        self.memory.q_proj = self.memory.k_proj = GivenKeys(heads, weights=weights)  # pyright: ignore[reportAttributeAccessIssue]
        self.mlp = SwiGLU(hidden_size, 2 * hidden_size, dropout=0.0)
        self.norms = nn.ModuleList([nn.RMSNorm(hidden_size, eps=1e-5) for _ in range(3)])
        self.head = nn.Linear(hidden_size, labels)

    def forward(self, tokens: Tensor, addresses: Tensor, queries: int) -> Tensor:
        """Compute the logits of the last `queries` tokens, [B,Q,labels]."""
        self.memory.q_proj.addresses = addresses
        h = self.embedding(tokens)
        h = (h + self.memory(self.norms[0](h))[0])[:, -queries:]
        h = h + self.mlp(self.norms[1](h))
        return self.head(self.norms[2](h))


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Settings that both learned tasks share.

    Attributes:
        budget: numbers kept per head, at most.
        train: optimiser, batch size and steps.
        test_examples: sequences of each test.
    """

    budget: int
    train: TrainSettings
    test_examples: int = 256

    def _train(
        self,
        design: Design,
        sizes: Fit,
        task: Collisions | RandomKeys,
        sample: Callable[[int], Addressed],
        seed: int,
        directory: Path,
        watch: Callable[[Progress], None],
    ) -> tuple[RecallModel, dict[str, Any]]:
        torch.manual_seed(seed)
        model = RecallModel(design, sizes, task.token_dim, task.labels)

        def batch(step: int) -> dict[str, Tensor]:
            drawn = sample(step)
            return {"tokens": drawn.tokens, "addresses": drawn.addresses, "answers": drawn.answers}

        trained = train(model, batch, losses, self.train, seed=seed, directory=directory, watch=watch)
        facts = {
            "sizes": str(sizes),
            "parameters": sum(p.numel() for p in model.parameters()),
            "training_loss": trained.loss,
            "seconds": round(trained.seconds, 1),
        }
        return model.eval(), facts

    @torch.no_grad()
    def _accuracy(self, model: RecallModel, draw: Callable[[int], Addressed]) -> dict[str, float]:
        batches = [draw(size) for size in _portions(self.test_examples)]
        logits = torch.cat([model(b.tokens, b.addresses, b.answers.shape[1]) for b in batches]).flatten(0, 1)
        answers = torch.cat([b.answers for b in batches]).flatten()
        right = (logits.argmax(-1) == answers).float().mean().item()
        return {"accuracy": right, "cross_entropy": F.cross_entropy(logits, answers).item()}


@dataclass(frozen=True, kw_only=True)
class Recall(Learned):
    r"""Learned recall under collisions: K pairs of a target and a distractor whose addresses overlap by ρ.

    Addresses have the dimension of the task, so the budget is spent on value columns.

    Attributes:
        task: what sequences are drawn from.
        distractor_writes: $n_f$ of training, one drawn for each batch.
        overlap: ρ of training, uniform.
        tests: $n_f$ and ρ of each test.
    """

    task: Collisions = field(default_factory=Collisions)
    distractor_writes: tuple[int, ...] = (1, 2, 4)
    overlap: tuple[float, float] = (0.60, 0.80)
    tests: tuple[tuple[int, float], ...] = ((4, 0.80), (32, 0.80), (4, 0.95), (32, 0.95))

    def run(self, name: str, seed: int, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
        """Train and test one design."""
        design = catalogue[name]
        sizes = most_values(design, self.task.address_dim, self.budget)

        def sample(step: int) -> Addressed:
            rng = generator("compare", "recall", seed, step)
            writes = self.distractor_writes[int(torch.randint(len(self.distractor_writes), (), generator=rng))]
            return self.task.sample(self.train.batch_size, writes, self.overlap, rng)

        model, facts = self._train(design, sizes, self.task, sample, seed, directory, watch)
        for writes, rho in self.tests:
            rng = generator("compare", "recall test", writes, f"{rho:.4f}")
            test = self._accuracy(model, lambda size, n=writes, x=rho, rng=rng: self.task.sample(size, n, (x, x), rng))
            facts[f"n_f = {writes}, ρ = {rho:.2f}"] = test
        return facts


@dataclass(frozen=True, kw_only=True)
class Crowding(Learned):
    """Random keys: n writes at random addresses, more and more of them.

    Memories see addresses through a frozen projection, so the budget is spent on key rows.

    Attributes:
        task: what sequences are drawn from; its address size gives way to that of each design.
        values: value columns of every design.
        writes: n of training, one drawn for each batch.
        tests: n of each test.
    """

    task: RandomKeys = field(default_factory=lambda: RandomKeys(labels=32))
    values: int = 16
    writes: tuple[int, ...] = (8, 16, 32)
    tests: tuple[int, ...] = (16, 32, 64)

    def run(self, name: str, seed: int, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
        """Train and test one design."""
        design = catalogue[name]
        sizes = most_keys(design, self.values, self.budget)
        task = replace(self.task, address_dim=sizes.D)

        def sample(step: int) -> Addressed:
            rng = generator("compare", "crowding", seed, step)
            writes = self.writes[int(torch.randint(len(self.writes), (), generator=rng))]
            return task.sample(self.train.batch_size, writes, rng)

        model, facts = self._train(design, sizes, task, sample, seed, directory, watch)
        for writes in self.tests:
            rng = generator("compare", "crowding test", writes)
            facts[f"n = {writes}"] = self._accuracy(model, lambda size, n=writes, rng=rng: task.sample(size, n, rng))
        return facts


def _portions(examples: int, size: int = 64) -> list[int]:
    return [min(size, examples - start) for start in range(0, examples, size)]
