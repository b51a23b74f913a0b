"""Settings of the length study, and one run of it: train at one length, measure at many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from membydesign.data.seeds import generator
from membydesign.design import catalogue
from membydesign.experiments.length.data import NOTHING, Fillers
from membydesign.filter import filter_sequence
from membydesign.layers import MemoryLayer
from membydesign.layers.memory import ON_SCAFFOLD
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.reports.provenance import commit
from membydesign.training import Run, TrainSettings, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from membydesign.experiments.length.data import Batch
    from membydesign.training import Progress

PLACEMENTS = ("anywhere", "recent")
QUANTILES = tuple(i / 20 for i in range(21))
"""The quantiles of gains that are kept."""


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """Settings that the study and its runs share.

    Attributes:
        task: what sequences are drawn from.
        length: of training.
        times: the lengths of tests, relative to training.
        train: optimiser, batch size and steps.
        test_examples: sequences of each test.
        gain_examples: sequences over which gains are pooled.
        layers: of the model; one learns the task in half the steps that two take.
    """

    task: Fillers = field(default_factory=Fillers)
    length: int = 128
    times: tuple[int, ...] = (1, 4, 16, 64)
    train: TrainSettings = field(
        default_factory=lambda: TrainSettings(
            steps=250,
            batch_size=16,
            learning_rate=1e-2,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            warmup=30,
            final_fraction=0.02,
            save_every=50,
        )
    )
    test_examples: int = 64
    gain_examples: int = 32
    layers: int = 1


@dataclass(frozen=True, kw_only=True)
class LengthRun(LengthSettings):
    """Settings of one run.

    Attributes:
        design: a name of the catalogue.
        seed: for weights and data.
    """

    design: str
    seed: int

    def model(self) -> MemoryForCausalLM:
        """Build the untrained model: layers of two heads with D = 32."""
        torch.manual_seed(self.seed)
        layer = self.design if self.design in ON_SCAFFOLD else f"{self.design}_style"
        return MemoryForCausalLM(
            MemoryConfig(
                vocab_size=self.task.vocabulary,
                hidden_size=64,
                layers=[layer] * self.layers,
                num_heads=2,
                intermediate_size=128,
                initializer_range=0.1,
                layer_options={layer: {"short_convolution": 2}},
            )
        )

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the training batch of a step."""
        drawn = self.task.sample(self.train.batch_size, self.length, generator("length", self.seed, step))
        return {"input_ids": drawn.ids, "labels": drawn.labels}

    def tests(self, times: int, placement: str, examples: int) -> Iterator[Batch]:
        """Yield test sequences, the same for every model; a few at a time where they are long."""
        rng = generator("length", "test", times, placement)
        window = self.length if placement == "recent" else None
        size = max(1, min(examples, 256 // times))
        for start in range(0, examples, size):
            yield self.task.sample(min(size, examples - start), times * self.length, rng, window=window)


def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy at every key that was written before."""
    asked = batch["labels"] != NOTHING
    return F.cross_entropy(model(batch["input_ids"]).logits[asked], batch["labels"][asked], reduction="none")


def work(config: LengthRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Train a model, and measure recall and gains at every length."""
    made_by, model = commit(), config.model()
    trained = train(model, config.batch, losses, config.train, seed=config.seed, directory=directory, watch=watch)
    model.eval()
    recall = {at: {str(n): accuracy(model, config, n, at) for n in config.times} for at in PLACEMENTS}
    return {
        "commit": made_by,
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_loss": trained.loss,
        "seconds": round(trained.seconds, 1),
        "recall": recall,
        "gains": gain_statistics({n: gains(model, config, n) for n in config.times}),
    }


def measure_untrained(config: LengthRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Measure the gains of a new model, whose noises and decays have their starting values."""
    del directory, watch
    made_by, model = commit(), config.model().eval()
    return {"commit": made_by, "gains": gain_statistics({n: gains(model, config, n) for n in config.times})}


@torch.no_grad()
def accuracy(model: MemoryForCausalLM, config: LengthRun, times: int, placement: str) -> float:
    """Return the share of queries answered with the right value."""
    right = [
        model(batch.ids).logits[:, -config.task.pairs :].argmax(-1) == batch.labels[:, -config.task.pairs :]
        for batch in config.tests(times, placement, config.test_examples)
    ]
    return torch.cat(right).float().mean().item()


@torch.no_grad()
def gains(model: MemoryForCausalLM, config: LengthRun, times: int) -> Tensor:
    r"""Return how strongly new pairs are written, $\beta_t k_t^\top u_t$, pooled over layers, heads and sequences.

    The last tokens, as many as a training sequence has, are drawn as in training, and only fillers come before. So what
    is written is the same at every length, and only the position in the sequence differs. A memory with a kept
    covariance is as unsure of a key just after its write as $k_t^\top P_t k_t = r_t^2 g_t$, which gives the gain.
    """
    found: list[Tensor] = []
    new = [torch.empty(0)]

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, MemoryLayer)
        x = layer.step_inputs(inputs[0], None, None)[0]
        out = filter_sequence(layer.design, x.k, x.k, x.v, **x.parameters, return_variance=True)  # pyright: ignore[reportArgumentType]
        noise = torch.as_tensor(x.parameters["write_noise"])
        assert out.variance is not None
        gain = out.variance / (noise[..., None] if noise.ndim == x.k.ndim - 1 else noise)
        found.append(gain[new[0]].flatten())

    hooks = [mixer.register_forward_pre_hook(record) for mixer in model.model.mixers()]
    for batch in config.tests(times, "recent", config.gain_examples):
        new[0] = batch.new
        model(batch.ids)
    for hook in hooks:
        hook.remove()
    return torch.cat(found)


def gain_statistics(gains: Mapping[int, Tensor]) -> dict[str, Any]:
    """Return quantiles of the gains at every length, and the distance of their distributions from that of training."""
    trained = gains[min(gains)].double()
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    return {
        str(times): {
            "quantiles": each.double().quantile(at).tolist(),
            "mean": each.double().mean().item(),
            "distance": distance(each.double(), trained),
        }
        for times, each in gains.items()
    }


def distance(a: Tensor, b: Tensor) -> float:
    """Return the Kolmogorov–Smirnov distance: the largest difference of two distribution functions."""
    points = torch.cat((a, b)).sort().values
    below_a, below_b = (torch.searchsorted(x.sort().values, points, right=True) / len(x) for x in (a, b))
    return (below_a - below_b).abs().max().item()


@dataclass(frozen=True, kw_only=True)
class LengthConfig(LengthSettings):
    """Settings of the study.

    Attributes:
        designs: names of the catalogue; those that it lacks are left out.
        seeds: number of seeds.
    """

    designs: tuple[str, ...] = ("bayesian_layer", "stationary_bayesian_layer", "partial_reset")
    seeds: int = 3

    @property
    def names(self) -> tuple[str, ...]:
        """The designs that the catalogue has."""
        return tuple(name for name in self.designs if name in catalogue)

    def runs(self) -> list[Run]:
        """Return every run, those of the first seed first."""
        from membydesign.experiments.shared.settings import shared_values

        shared = shared_values(LengthRun, self)
        every = [LengthRun(**shared, design=name, seed=seed) for seed in range(self.seeds) for name in self.names]
        trained = [Run(f"{run.design}-seed{run.seed}", run, work) for run in every]
        return [*(Run(f"{run.design}-untrained-seed{run.seed}", run, measure_untrained) for run in every), *trained]


_SMOKE = TrainSettings(steps=3, batch_size=4, learning_rate=5e-3)
PRESETS = {
    "smoke": LengthConfig(length=80, times=(1, 4), train=_SMOKE, seeds=1, test_examples=8, gain_examples=4),
    "cpu": LengthConfig(),
}
"""`cpu` takes about ten minutes on one core."""
