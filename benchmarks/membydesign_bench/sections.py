"""The parts of the benchmark, by the names that `mbd bench --only` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.errors import did_you_mean
from membydesign_bench.accelerated import accelerated
from membydesign_bench.accuracy import accuracy
from membydesign_bench.choices import choices
from membydesign_bench.cpu_peers import cpu_peers
from membydesign_bench.designs import designs
from membydesign_bench.generation import generation
from membydesign_bench.memory import memory
from membydesign_bench.models import models
from membydesign_bench.rate import rate
from membydesign_bench.speed import growth, speed, transition
from membydesign_bench.steps import steps
from membydesign_bench.text import text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from membydesign_bench.timing import Job, Settings


class Section(NamedTuple):
    """A part of the benchmark.

    Attributes:
        title: what it says, and how its ratio is to be read.
        jobs: what is to be run.
    """

    title: str
    jobs: Callable[[Settings], Iterator[Job]]


SECTIONS: dict[str, Section] = {
    "speed": Section("Time; a ratio below 1 is faster than the peer", speed),
    "models": Section("Time of whole models; a ratio below 1 is faster than the peer", models),
    "accelerate": Section("Transformers models on our kernels, CPU time; a ratio below 1 is faster", accelerated),
    "steps": Section("Time of a training step of the experiments; a ratio below 1 is faster than the peer", steps),
    "transitions": Section("Time of the Bayesian Layer by how memory drifts", transition),
    "designs": Section(
        "Time of the catalogue's designs; a ratio below 1 is faster than the design it extends", designs
    ),
    "growth": Section("Time for each token of a long sequence; 1 is linear growth", growth),
    "peers": Section("Time against other CPU kernels; a ratio below 1 is faster than the peer", cpu_peers),
    "generation": Section(
        "Tokens a second of generation; the ratio is how many times faster with the cache", generation
    ),
    "memory": Section("Peak memory on top of the inputs; a ratio below 1 is less than the peer's", memory),
    "rate": Section("Useful operations a second; the ratio is the share of the matrix-product rate", rate),
    "accuracy": Section("Distance of float32 from float64, in units of the largest value", accuracy),
    "text": Section("Text, in tokens a second; a ratio above 1 is faster than the obvious way", text),
    "choices": Section("Every backend and chunk size of the dense filter; times the fastest one's time", choices),
}


ON_GPU = ("speed", "transitions", "growth", "memory")
"""The sections that `--device cuda` has; the others are about CPUs, or compare with code for them."""


def chosen(words: Iterable[str], device: str = "cpu") -> list[str]:
    """The sections that a user names, each word one name or several with commas; all of a device for no word."""
    available = [name for name in SECTIONS if device == "cpu" or name in ON_GPU]
    names = [name for word in words for name in word.split(",")]
    for name in names:
        if name not in available:
            near = did_you_mean(name, available)
            where = "" if device == "cpu" else f" with --device {device}"
            raise ValueError(f"--only: expected some of {', '.join(available)}{where}, got {name!r}{near}")
    return [name for name in available if name in names or not names]


def check_device(device: str) -> None:
    """Raise an error for a device that is unknown or unavailable."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device: expected cpu, since torch finds no GPU here (torch.cuda.is_available() is False), got 'cuda'"
        )
