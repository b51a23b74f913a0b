"""Measure how far float32 is from float64 on hard streams, for every way to run the filter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from membydesign.design import Dense, DesignModel, ObserveMemory, ScalarDecay
from membydesign.errors import NotPositiveDefiniteError
from membydesign.filter import filter_sequence
from membydesign_bench.problem import Size
from membydesign_bench.timing import Job, Row, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from membydesign.belief import Belief

LOOP = "loop"
METHODS: dict[str, dict[str, Any]] = {
    LOOP: {"method": "recurrent"},
    "native": {"backend": "native"},
    "torch": {"backend": "torch"},
    "native, C = 64": {"backend": "native", "chunk_size": 64},
    "torch, C = 64": {"backend": "torch", "chunk_size": 64},
}


@dataclass(frozen=True)
class Stream:
    """Keys of norm 1 in all directions, decays 0.98 to 1, ℓ² up to 0.11, r² from 0.1 to 0.6, unless said otherwise.

    Attributes:
        title: what is hard about it.
        log_decays: taken in turn, token by token; None for random ones.
        process_noise: ℓ², or None for random ones.
        write_noise: r², or None for random ones.
        spread: how far keys lie around one direction; None for all directions.
        norm: of keys.
        prior: p₀.
        T: how many tokens by default.
    """

    title: str
    log_decays: tuple[float, ...] | None = None
    process_noise: float | None = None
    write_noise: float | None = None
    spread: float | None = None
    norm: float = 1.0
    prior: float = 1.0
    T: int = 4096

    def design(self) -> DesignModel:
        """The Bayesian Layer with one decay."""
        return DesignModel(ScalarDecay(), ObserveMemory(), Dense(prior=self.prior))

    def inputs(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """The arguments of `filter_sequence`, float32."""
        B, H, T, D = size
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(B, T, H, D, generator=generator) for _ in range(3))
        log_decay, process_noise, write_noise = (torch.rand(B, T, H, generator=generator) for _ in range(3))
        if self.spread is not None:
            centre = torch.randn(B, 1, H, D, generator=torch.Generator().manual_seed(0))
            k = torch.nn.functional.normalize(centre, dim=-1) + self.spread * k
        log_decay, process_noise, write_noise = -0.02 * log_decay, 0.01 + 0.1 * process_noise, 0.1 + 0.5 * write_noise
        if self.log_decays is not None:
            in_turn = torch.tensor(self.log_decays).repeat(-(-T // len(self.log_decays)))[:T]
            log_decay = in_turn[None, :, None].expand(B, T, H)
        if self.process_noise is not None:
            process_noise = torch.full_like(process_noise, self.process_noise)
        if self.write_noise is not None:
            write_noise = torch.full_like(write_noise, self.write_noise)
        return {
            "q": torch.nn.functional.normalize(q, dim=-1),
            "k": self.norm * torch.nn.functional.normalize(k, dim=-1),
            "v": v,
            "log_decay": log_decay,
            "process_noise": process_noise,
            "write_noise": write_noise,
        }


STREAMS = {
    "trained": Stream("like a trained layer", T=65536),
    "decay 1e-4": Stream("a decay of 1e-4 at every step", log_decays=(math.log(1e-4),)),
    "decays 1, 1e-3": Stream("decays 1 and 1e-3 in turn", log_decays=(0.0, math.log(1e-3))),
    "near-duplicates": Stream(
        "near-duplicate keys, r² = 1e-4, no decay or process noise, p₀ = 3",
        log_decays=(0.0,),
        process_noise=0.0,
        write_noise=1e-4,
        spread=0.01,
        prior=3.0,
    ),
    "sure writes": Stream(
        "r² = 1e-4, no decay or process noise, p₀ = 3",
        log_decays=(0.0,),
        process_noise=0.0,
        write_noise=1e-4,
        prior=3.0,
    ),
    "large noise": Stream("no decay, ℓ² = 1", log_decays=(0.0,), process_noise=1.0),
    "keys of norm 10": Stream("keys of norm 10", norm=10.0),
}
SIZES = (Size(1, 2, 0, 16), Size(1, 2, 0, 64))
"""B,H,D; T is each stream's own."""


class Distance(NamedTuple):
    """Float32 from float64, the largest difference in units of the largest value."""

    output: float
    covariance: float


def distances(stream: Stream, size: Size) -> dict[str, Distance | None]:
    """Return the distance of each of `METHODS`; None where it reports that the covariance was lost."""
    inputs = stream.inputs(size)
    wide = {name: x.double() for name, x in inputs.items()}
    exact = filter_sequence(stream.design(), **wide, backend="native")
    results: dict[str, Distance | None] = {}
    for name, options in METHODS.items():
        try:
            out = filter_sequence(stream.design(), **inputs, **options)
        except NotPositiveDefiniteError:
            results[name] = None
            continue
        results[name] = Distance(
            _distance(out.output, exact.output), _distance(_covariance(out.belief), _covariance(exact.belief))
        )
    return results


def accuracy(settings: Settings) -> Iterator[Job]:
    """Compare every method on every stream with the loop over tokens."""
    for name, stream in STREAMS.items():
        for size in settings.sizes or tuple(each._replace(T=stream.T) for each in SIZES):
            yield Job(f"accuracy at {size}: {stream.title}", partial(_accuracy, name, size))


def _accuracy(name: str, size: Size) -> list[Row]:
    results = distances(STREAMS[name], size)
    loop = results.pop(LOOP)
    rows = []
    for method, distance in results.items():
        for quantity in Distance._fields:
            value, reference = (None if d is None else getattr(d, quantity) for d in (distance, loop))
            rows.append(Row("accuracy", f"{name}, {quantity}", str(size), method, value, "", LOOP, reference))
    return rows


def _covariance(belief: Belief) -> Tensor:
    assert belief.covariance is not None
    return belief.covariance


def _distance(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()
