"""Speed against peers, as ratios: everything in one process, interleaved, the median of several rounds.

Machines differ and are noisy; a ratio of two things that were timed in turn is what can be compared.
"""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design import Dense, DesignModel, ObserveMemory, ScalarDecay, catalogue
from membydesign.ops import filter_sequence, filter_step

SIZES = ((64, 4, 128, 16), (16, 4, 512, 32), (1, 4, 2048, 64), (1, 4, 2048, 128), (1, 4, 2048, 256))
"""(B, H, T, D) with M = D."""

BAYESIAN = DesignModel(ScalarDecay(), ObserveMemory(), Dense(), title="Bayesian Layer")
Work = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Times of one task at one size, in milliseconds, by name; the peer is what ratios refer to."""

    task: str
    size: tuple[int, int, int, int]
    milliseconds: dict[str, float]
    peer: str

    def ratios(self) -> dict[str, float]:
        """Each time over the peer's: below 1 is faster than the peer."""
        return {name: value / self.milliseconds[self.peer] for name, value in self.milliseconds.items()}


def parse_size(text: str) -> tuple[int, int, int, int]:
    """B,H,T,D as a user writes it."""
    try:
        B, H, T, D = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--size: expected four whole numbers B,H,T,D such as 1,4,2048,64, got {text!r}") from None
    if min(B, H, T, D) < 1:
        raise ValueError(f"--size: expected numbers of at least 1, got {text!r}")
    return B, H, T, D


def transformers_peers() -> dict[str, Callable[..., object]]:
    """Transformers' own Gated DeltaNet on a CPU, chunked and one step; empty if Transformers is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ImportError:
        return {}
    return {"chunk": module.torch_chunk_gated_delta_rule, "step": module.torch_recurrent_gated_delta_rule}


def measure(size: tuple[int, int, int, int], rounds: int, *, naive: bool) -> list[Measured]:
    """Forward, forward with backward, and one decoding step at one size."""
    found = []
    for task in ("forward", "forward+backward", "decode"):
        works = _decoding(size) if task == "decode" else _training(size, backward=task != "forward", naive=naive)
        peer = next((name for name in works if name.startswith("Transformers")), next(iter(works)))
        found.append(Measured(task, size, _interleaved(works, rounds), peer))
    return found


def product_rate(rounds: int = 5, n: int = 1024) -> float:
    """The machine's own matrix-product rate in GFLOP/s, float32."""
    a = torch.randn(n, n)
    times = _interleaved({"product": lambda: a @ a}, rounds)
    return 2 * n**3 / times["product"] / 1e6


def _interleaved(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """The median time of each, in milliseconds, taken in turn; a first round of each is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _random(size: tuple[int, int, int, int], *, backward: bool) -> list[Tensor]:
    """q, k, v, log_decay, process_noise, write_noise."""
    B, H, T, D = size
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, D, generator=generator).unbind()
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, process, write = torch.rand(3, B, T, H, generator=generator).unbind()
    return [x.requires_grad_(backward) for x in (q, k, v, -0.1 * decay, 0.01 + 0.1 * process, 0.1 + write)]


def _training(size: tuple[int, int, int, int], *, backward: bool, naive: bool) -> dict[str, Work]:
    q, k, v, log_decay, process_noise, write_noise = _random(size, backward=backward)

    def done(output: Tensor) -> None:
        if backward:
            output.sum().backward()

    def bayesian(**way: str) -> None:
        noises = {"process_noise": process_noise, "write_noise": write_noise}
        done(filter_sequence(BAYESIAN, q, k, v, log_decay=log_decay, **noises, **way).output)  # pyright: ignore[reportArgumentType]

    def gated_deltanet() -> None:
        step = {"log_decay": log_decay, "prior_variance": 1.0, "write_noise": write_noise}
        done(filter_sequence(catalogue["gated_deltanet"], q, k, v, **step).output)

    works: dict[str, Work] = {
        "Bayesian Layer": bayesian,
        "Bayesian Layer, torch": lambda: bayesian(backend="torch"),
        "Gated DeltaNet, ours": gated_deltanet,
    }
    if naive:
        works["Bayesian Layer, loop"] = lambda: bayesian(method="recurrent")
    peers = transformers_peers()
    if peers:
        gate = (write_noise / 2).detach().requires_grad_(backward)
        works["Transformers' Gated DeltaNet"] = lambda: done(
            peers["chunk"](q, k, v, g=log_decay, beta=gate, output_final_state=True)[0]  # pyright: ignore[reportIndexIssue]
        )
    return works


def _decoding(size: tuple[int, int, int, int]) -> dict[str, Work]:
    B, H, _, D = size
    q, k, v, log_decay, process_noise, write_noise = (x[:, 0] for x in _random((B, H, 1, D), backward=False))
    belief = Belief.prior(BAYESIAN, B, H, D, D)
    noises = {"process_noise": process_noise, "write_noise": write_noise}
    works: dict[str, Work] = {
        "Bayesian Layer": lambda: filter_step(BAYESIAN, belief, q, k, v, log_decay=log_decay, **noises),
    }
    peers = transformers_peers()
    if peers:
        one = [x[:, None] for x in (q, k, v)]
        rest = {"g": log_decay[:, None], "beta": write_noise[:, None] / 2, "initial_state": torch.zeros(B, H, D, D)}
        works["Transformers' Gated DeltaNet"] = lambda: peers["step"](*one, **rest, output_final_state=True)
    return works
