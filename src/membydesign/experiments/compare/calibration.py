r"""Calibration: what a memory predicts of values whose noise is not the one that it was told.

A stream writes $v_t = S^\top k_t + \sigma_t \epsilon_t$ at keys from a codebook, half of which is never written. $S$
is drawn from the prior that designs are told; they are also told $r^2$. The noise is what they were told, of another
size, changing, or heavy-tailed. Nothing is trained.

Predictions are judged in every doubling of the length of a stream, because a belief about the size of the noise takes
time to form; the results are those of the last doubling, and the coverage of each is kept too.

Intervals come from the predictive density that the design itself states: $p(v_t \mid v_{<t})$ as a function of $v_t$ is
what `Design.condition` returns as log evidence, so the probability below the observed value is its integral on a grid.
That works for densities of any form. Values have one column, M = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from membydesign.data.seeds import generator
from membydesign.design import Step, Written, catalogue
from membydesign.experiments.compare.parameters import fixed
from membydesign.experiments.compare.sizes import Cannot, fit
from membydesign.state import Sizes, map_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design import Design

NOISES = {
    "as told": "Gaussian, of the stated variance",
    "smaller": "Gaussian, of 1/8 to 1/2 of the stated variance, constant in each stream",
    "larger": "Gaussian, of 2 to 8 times the stated variance, constant in each stream",
    "changing": "Gaussian, of a variance that switches between 1/4 and 4 times the stated one",
    "heavy-tailed": "one value in ten has 100 times the stated variance",
}
"""Every kind of noise, and what it is."""

INTERVALS = (0.5, 0.9)
SHORTEST = 30
"""Predictions are judged from this many writes on, or later."""
TOTAL = 0.05
"""How far from one the integral of a density on the grid may be."""
_REACH, _FINEST = 7.0, 0.05
"""The grid is centre + _FINEST · sinh(u) for |u| ≤ _REACH, so it reaches 27 to either side."""


class Streams(NamedTuple):
    """Simulated streams.

    Attributes:
        codebook: unit keys, [B,N,D]; the first half is written.
        written: index of the key of every write, [B,T].
        values: written values, [B,T].
    """

    codebook: Tensor
    written: Tensor
    values: Tensor

    @property
    def k(self) -> Tensor:
        """The key of every write, [B,T,D]."""
        return self.codebook.gather(1, self.written[..., None].expand(-1, -1, self.codebook.shape[-1]))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Settings of the task.

    Attributes:
        D: key size.
        keys: keys of the codebook; half are written.
        writes: length of a stream.
        streams: number of streams.
        judged: predictions that are judged, about, in each doubling of the length of a stream.
        grid: points at which a predictive density is evaluated.
        write_noise: the r² that designs are told.
        prior: the prior variance of memory, also what a reset returns to.
    """

    D: int = 16
    keys: int = 24
    writes: int = 960
    streams: int = 128
    judged: int = 8
    grid: int = 97
    write_noise: float = 0.1
    prior: float = 1.0

    def doublings(self) -> list[range]:
        """Return the writes before which predictions are judged: those of the second half, the quarter before it, …"""
        found, end = [], self.writes
        while not found or end // 2 >= SHORTEST:
            start = end // 2
            found.append(range(start, end, max(1, (end - start) // self.judged)))
            end = start
        return found[::-1]

    def measure(self, name: str, seed: int) -> dict[str, Any]:
        """Judge one design under every kind of noise."""
        design = catalogue[name]
        return {
            "sizes": f"{self.D}×1: {design.state_size(self.D, 1).total}",
            **{noise: judge(design, self, self.draw(noise, seed)) for noise in NOISES},
        }

    def draw(self, noise: str, seed: int) -> Streams:
        """Simulate streams with a kind of noise; memories and keys are the same for every kind."""
        rng = generator("compare", "calibration", seed)
        B, T = self.streams, self.writes
        codebook = F.normalize(torch.randn(B, self.keys, self.D, generator=rng, dtype=torch.float64), dim=-1)
        memory = math.sqrt(self.prior) * torch.randn(B, self.D, generator=rng, dtype=torch.float64)
        written = torch.randint(self.keys // 2, (B, T), generator=rng)
        exact = torch.einsum("bnd,bd->bn", codebook, memory).gather(1, written)
        errors = torch.randn(B, T, generator=rng, dtype=torch.float64)
        variance = self.write_noise * _factor(noise, B, T, rng)
        return Streams(codebook, written, exact + variance.sqrt() * errors)


def _factor(noise: str, B: int, T: int, rng: torch.Generator) -> Tensor:
    """Return the variance of the noise relative to what designs are told, [B,T]."""
    uniform = torch.rand(B, T, generator=rng, dtype=torch.float64)
    if noise == "as told":
        return torch.ones_like(uniform)
    if noise in ("smaller", "larger"):
        size = 2 ** (1 + 2 * uniform[:, :1])  # log-uniform
        return (size if noise == "larger" else 1 / size).expand(B, T)
    if noise == "changing":  # each stream switches about every fortieth write, from a random start
        switched = (uniform < 1 / 40).long()
        switched[:, 0] = (uniform[:, 0] < 0.5).long()
        return torch.where(switched.cumsum(1) % 2 == 0, 0.25, 4.0).to(uniform)
    if noise == "heavy-tailed":
        return torch.where(uniform < 0.1, 100.0, 1.0).to(uniform)
    raise ValueError(f"noise: expected one of {', '.join(NOISES)}, got {noise!r}")


def judge(design: Design, config: Calibration, streams: Streams) -> dict[str, Any]:
    """Filter the streams, and compare what was predicted with what came.

    Returns:
        For the second half of the streams: the coverage of each interval with its standard error, and the mean log
        score; how well the variance of a read separates keys that were never written from the others (area under the
        curve); and the coverage of 90 % intervals by number of writes.

    Raises:
        Cannot: if the design states no variance, or what it states of a value is not a probability density.
    """
    refuse(design, config.D)
    B, T = streams.values.shape
    state = design.prior(Sizes(B, 1, config.D, 1), dtype=torch.float64, device=None)
    told = {"process_noise": 0.0, "write_noise": config.write_noise}
    told |= dict.fromkeys(("prior_variance", "stationary_variance"), config.prior)
    parameters, keys = fixed(design, told), streams.k
    doublings = config.doublings()
    below, scores = {t: torch.empty(0) for times in doublings for t in times}, []
    for t in range(T):
        k, v = keys[:, t, None], streams.values[:, t, None, None]
        step = Step(_parameters(design, parameters, B, config.D), k)
        predicted = design.predict(state, step)
        if t in below:
            below[t] = probability_below(design, parameters, predicted, k, v, config.grid)
        written = Written(*design.condition(predicted, k, v, step))  # pyright: ignore[reportArgumentType]
        if t >= T // 2:
            scores.append(written.log_evidence[:, 0])
        state = written.state
    p = [torch.stack([below[t] for t in times]) for times in doublings]
    result: dict[str, Any] = {}
    for share in INTERVALS:
        of_stream = inside(p[-1], share).mean(0)
        result[f"coverage {int(100 * share)}"] = of_stream.mean().item()
        result[f"coverage {int(100 * share)} error"] = (of_stream.std() / math.sqrt(B)).item()
    result["log score"] = torch.stack(scores).mean().item()
    result["never written"] = never_written(design, parameters, state, streams)
    result["by writes"] = {
        named(times): inside(each, 0.9).mean().item() for times, each in zip(doublings, p, strict=True)
    }
    return result


def inside(p: Tensor, share: float) -> Tensor:
    """Return 1 where a probability lies in the central interval that should hold this share of values, else 0."""
    return ((p - 0.5).abs() <= share / 2).double()


def named(times: range) -> str:
    """Return how tables call predictions at these writes."""
    return f"{times.start} to {times.stop}"


def refuse(design: Design, D: int) -> None:
    """Say why a design cannot be judged, if it cannot."""
    if not design.has_variance:
        raise Cannot("states no variance")
    if design.key_bound != "finite" or design.value_bound != "finite":
        raise Cannot(f"keys must be {design.key_bound} and values {design.value_bound}; here both have any sign")
    if fit(design, D, 1) is None:
        raise Cannot(f"expects {design.refuse_key_size(D) or design.refuse_value_size(1)}, got {D}×1")


def probability_below(
    design: Design, parameters: Mapping[str, float], predicted: Any, k: Tensor, v: Tensor, points: int
) -> Tensor:
    """Return the predictive probability of a value below the one that was written, [B].

    Args:
        design: the assumptions.
        parameters: a number for every step parameter.
        predicted: the state before the write.
        k: the key, [B,1,D].
        v: the value, [B,1,1].
        points: of the grid.

    Raises:
        Cannot: if the density does not integrate to one.
    """
    B, D = k.shape[0], k.shape[-1]
    step = Step(_parameters(design, parameters, B, D), k)
    centre = design.read(predicted, k, step).mean[:, 0, 0]
    x = centre[:, None] + _FINEST * torch.linspace(-_REACH, _REACH, points, dtype=torch.float64).sinh()

    def repeated(y: Tensor) -> Tensor:
        return y.repeat_interleave(points, 0)

    step = Step(_parameters(design, parameters, B * points, D), repeated(k))
    written = design.condition(map_state(repeated, predicted), repeated(k), x.reshape(-1, 1, 1), step)
    density = written[1].reshape(B, points).exp()
    areas = (density[:, 1:] + density[:, :-1]) / 2 * x.diff(dim=1)
    cumulative = torch.cat([areas.new_zeros(B, 1), areas.cumsum(1)], 1)
    value = v[:, 0].clamp(min=x[:, :1], max=x[:, -1:])
    right = torch.searchsorted(x, value).clamp(1, points - 1)
    low, high = (cumulative.gather(1, i)[:, 0] for i in (right - 1, right))
    left, width = x.gather(1, right - 1)[:, 0], x.diff(dim=1).gather(1, right - 1)[:, 0]
    total = cumulative[:, -1]
    if not bool(((total - 1).abs() < TOTAL).all()):
        raise Cannot(f"its evidence is not a density of the value: the integral is {total[0].item():.3g}")
    return (low + (high - low) * (value[:, 0] - left) / width) / total


def never_written(design: Design, parameters: Mapping[str, float], state: Any, streams: Streams) -> float:
    """Return how often a never written key has a larger variance than a written one; a tie counts half."""
    B, N, D = streams.codebook.shape
    last = streams.k[:, -1].repeat_interleave(N, 0)[:, None]
    step = Step(_parameters(design, parameters, B * N, D), last)
    queries = streams.codebook.reshape(B * N, 1, D)
    variance = design.read(map_state(lambda x: x.repeat_interleave(N, 0), state), queries, step).variance
    assert variance is not None
    of_key = variance[:, 0, 0].reshape(B, N)
    counts = F.one_hot(streams.written, N).sum(1)
    wins = (of_key[:, :, None] > of_key[:, None]).double() + 0.5 * (of_key[:, :, None] == of_key[:, None])
    pairs = (counts == 0)[:, :, None] & (counts > 0)[:, None]
    return wins[pairs].mean().item()


def _parameters(design: Design, values: Mapping[str, float], B: int, D: int) -> dict[str, Tensor]:
    """Spread numbers over batch and axes, as `filter_sequence` does."""
    tensors = {}
    for parameter in design.step_parameters:
        sizes = parameter.sizes(D, 1, design.gain_groups(1))
        tensors[parameter.name] = torch.full((B, 1, *sizes), values[parameter.name], dtype=torch.float64)
    return tensors
