"""How strongly a layer writes far beyond its training length: stationary drift next to free process noise.

    python examples/gains_by_length.py [--train 128] [--times 1 4 16 64] [--seed 0] [--json]

The gain of a write, kᵀP̄k/(r² + kᵀP̄k), is the share of an error that the write corrects: 0 keeps what memory holds, 1
replaces it. Two layers with the starting values of `MemoryLayer`, which differ in their process noise alone, read texts
of common words, whose vectors span a quarter of all directions, and of one rare word in fifty. Few writes reach the
other directions, so that what memory knows of them is decided by process noise.

For windows of the training length that end at 1, 4, … times that length, the script prints quantiles of the gains of
rare words, how far their distribution is from the one in training (the largest difference of the two distribution
functions), the share of them beyond 99 % of those in training, and the largest variance of any direction of memory.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from membydesign import filter_sequence
from membydesign.layers import MemoryLayer, make_layer

LAYERS = {"free process noise": "bayesian_layer", "stationary drift": "stationary_bayesian_layer"}
QUANTILES = (0.1, 0.5, 0.9)


class Window(NamedTuple):
    """The gains of one window.

    Attributes:
        times: where it ends, in training lengths.
        quantiles: of the gains of rare words in all heads, as `QUANTILES`.
        distance: Kolmogorov–Smirnov distance of these gains from those of the first window.
        above: the share of these gains that are larger than 99 % of those of the first window.
        largest_variance: the largest eigenvalue of any head's covariance at the window's end.
    """

    times: int
    quantiles: tuple[float, ...]
    distance: float
    above: float
    largest_variance: float


class Text(NamedTuple):
    """Word vectors, [B,T,hidden_size], and which of the words are rare, [B,T]."""

    x: Tensor
    rare: Tensor


def text(batch: int, length: int, hidden_size: int, generator: torch.Generator, share: float = 0.02) -> Text:
    """Texts of common words, whose vectors span a quarter of all directions, and a share of rare ones."""
    x = torch.randn(batch, length, hidden_size, generator=generator)
    rare = torch.rand(batch, length, generator=generator) < share
    few = torch.arange(hidden_size) < hidden_size // 4
    return Text(torch.where(rare[..., None] | few, x, 0.0), rare)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of the distribution functions of two samples."""
    every = torch.cat((a, b)).sort().values
    below = [torch.searchsorted(x.sort().values, every, right=True) / len(x) for x in (a, b)]
    return (below[0] - below[1]).abs().max().item()


@torch.no_grad()
def gains_by_length(layer: MemoryLayer, text: Text, train: int, times: tuple[int, ...]) -> list[Window]:
    """The gains of a layer that reads texts, in windows that end at multiples of the training length.

    A gain follows from the variance p of a read at the key of the write, p = r² × gain.
    """
    inputs, _ = layer.step_inputs(text.x, None, None)
    noise = inputs.parameters["write_noise"]
    assert isinstance(noise, Tensor)
    state, start, first, windows = None, 0, None, []
    for number in times:
        now = slice(start, number * train)
        parameters: dict[str, Any] = {
            name: x[:, now] if isinstance(x, Tensor) else x for name, x in inputs.parameters.items()
        }
        k, v = inputs.k[:, now], inputs.v[:, now]
        out = filter_sequence(layer.design, k, k, v, **parameters, initial=state, return_variance=True)
        assert out.variance is not None
        state, start = out.belief, now.stop
        gains = (out.variance[..., 0] / noise[:, now])[:, -train:][text.rare[:, now][:, -train:]].flatten()
        first = gains if first is None else first
        quantiles = tuple(gains.quantile(torch.tensor(QUANTILES)).tolist())
        largest = torch.linalg.eigvalsh(state.covariance).max().item()
        above = (gains > first.quantile(0.99)).float().mean().item()
        windows.append(Window(number, quantiles, distance(gains, first), above, largest))
    return windows


def compare(
    train: int = 128, times: tuple[int, ...] = (1, 4, 16, 64), seed: int = 0, batch: int = 64
) -> dict[str, list[Window]]:
    """Both layers, with the same weights, on the same texts."""
    results = {}
    for title, name in LAYERS.items():
        torch.manual_seed(seed)
        layer = make_layer(name, 64, num_heads=4, head_dim=32)
        assert isinstance(layer, MemoryLayer)
        texts = text(batch, train * max(times), 64, torch.Generator().manual_seed(seed))
        results[title] = gains_by_length(layer, texts, train, times)
    return results


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--train", type=int, default=128, help="the training length, in tokens")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4, 16, 64], help="multiples of it, rising")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = compare(options.train, tuple(options.times), options.seed)
    if options.json:
        print(json.dumps({title: [w._asdict() for w in windows] for title, windows in results.items()}))
        return
    heading = f"{'':<20}{'length':>8}{'gain 10 %':>11}{'median':>8}{'90 %':>8}"
    print(f"{heading}{'distance':>10}{'above':>8}{'largest variance':>18}")
    for title, windows in results.items():
        for w in windows:
            low, middle, high = w.quantiles
            row = f"{title:<20}{w.times * options.train:>8}{low:>11.3f}{middle:>8.3f}{high:>8.3f}"
            print(f"{row}{w.distance:>10.3f}{w.above:>8.3f}{w.largest_variance:>18.3g}")


if __name__ == "__main__":
    main()
