"""What processes check of sequences that are split in time; `test_stretches.py` runs it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import membydesign as mbd
from distributed.stretches import compared, own_part
from membydesign import catalogue
from problems import DESIGNS, random_problem

SIZE, RANK = dist.get_world_size(), dist.get_rank()
LENGTHS = {2: ((5, 6), (0, 7)), 4: ((3, 1, 5, 2), (1, 0, 6, 2))}[SIZE]
QUICK = {
    "dense": DESIGNS["dense_2_groups-diagonal"],
    "rotation": DESIGNS["dense-stationary_diagonal"].replace(transition=mbd.Stationary(mbd.DampedRotation())),
    "reset": DESIGNS["reset-scalar"],
    "per_column_reset": DESIGNS["per_column_reset-diagonal"],
    **{name: catalogue[name] for name in ("partial_reset", "discounted", "unknown_scale", "rwkv7", "count_memory")},
}


def check_scan() -> None:
    for design in QUICK.values():
        for lengths in LENGTHS:
            compared(design, lengths, "scan")


def check_pipeline() -> None:
    """Any design, also one that nobody can pass through a stretch as a map."""
    for design in (QUICK["dense"], catalogue["robust_writes"], catalogue["low_rank"], catalogue["hidden_markov"]):
        for lengths in LENGTHS:
            compared(design, lengths, "pipeline")


def check_packed_sequences() -> None:
    """Boundaries inside stretches and between them, and a sequence that goes on over several processes."""
    for bounds in ([0, 11], [0, 2, 3, 8, 11], [0, sum(LENGTHS[0][:1]), 11], [0, 10, 11]):
        for schedule in ("scan", "pipeline"):
            compared(QUICK["dense"], LENGTHS[0], schedule, cu_seqlens=bounds)
        compared(QUICK["unknown_scale"], LENGTHS[0], "scan", cu_seqlens=bounds)
    compared(QUICK["dense"], LENGTHS[1], "scan", cu_seqlens=[0, 4, sum(LENGTHS[1])])


def check_float32() -> None:
    for design in (QUICK["dense"], QUICK["reset"]):
        compared(design, LENGTHS[0], "scan", dtype=torch.float32, tolerance=1e-5)
        compared(design, LENGTHS[0], "pipeline", dtype=torch.float32, tolerance=1e-5)


class Counted:
    """Counts the bytes that this process passes to the functions of torch.distributed."""

    NAMES = ("all_gather", "all_reduce", "send", "recv", "broadcast")

    def __enter__(self) -> "Counted":
        self.bytes, self.calls = 0, 0
        self.before = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.before.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.before.items():
            setattr(dist, name, function)

    def _counting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            x = args[1] if name == "all_gather" else args[0]
            self.bytes += x.numel() * x.element_size()
            self.calls += 1
            return function(*args, **kwargs)

        return call


def check_bytes_do_not_depend_on_the_length() -> None:
    layer = mbd.MemoryLayer("bayesian_layer", 8, 2, 4, short_convolution=4)
    schedules: tuple[Any, ...] = ("scan", "pipeline")
    for schedule in schedules:
        counted = []
        for T in (8, 64):
            x = torch.randn(1, T, 8)
            with Counted() as count:
                y, _ = layer(x, stretch=mbd.Stretch.of(x, schedule=schedule))
                y.square().sum().backward()
            counted.append((count.calls, count.bytes))
        assert counted[0] == counted[1], (schedule, counted)
        assert counted[0][1] > 0


def check_two_exchanges() -> None:
    """One of covariance maps, one of mean maps; a design that keeps no covariance needs the second alone."""
    for name, exchanges in (("dense", 2), ("reset", 1)):
        p = random_problem(QUICK[name], B=1, T=3 * SIZE)
        own = p.map(lambda x: own_part(x, (3,) * SIZE))
        stretch = mbd.Stretch.of(own.q, schedule="scan")
        with Counted() as count, torch.no_grad():
            own.filter(stretch=stretch)
        assert count.calls == exchanges, name


def check_gradients_of_some_arguments() -> None:
    """Backward reaches every exchange, whatever gradients are asked for."""
    p = random_problem(QUICK["dense"], T=4)
    p.k.requires_grad_()
    schedules: tuple[Any, ...] = ("scan", "pipeline")
    for schedule in schedules:
        own = p.filter(stretch=mbd.Stretch.of(p.k, schedule=schedule))
        (gradient,) = torch.autograd.grad(own.output.sum(), p.k)
        assert gradient.abs().max() > 0


def check_refusals() -> None:
    p = random_problem(QUICK["dense"], T=4)
    stretch = mbd.Stretch.of(p.q)
    with pytest.raises(ValueError, match="cu_seqlens: expected None with a stretch"):
        p.filter(stretch=stretch, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"q: expected \[B,T,H,D\] with the T = 4 tokens of the stretch"):
        p.between(0, 3).filter(stretch=stretch)
    with pytest.raises(ValueError, match=rf"cu_seqlens: expected boundaries from 0 to T = {4 * SIZE}"):
        mbd.Stretch.of(p.q[:1], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match='schedule: expected "auto", "scan" or "pipeline", got \'ring\''):
        mbd.Stretch.of(p.q, schedule="ring")  # pyright: ignore[reportArgumentType]
    robust = random_problem(catalogue["robust_writes"], T=4)
    with pytest.raises(ValueError, match='schedule: expected "pipeline" .* since the noise of StudentTWrite'):
        robust.filter(stretch=mbd.Stretch.of(robust.q, schedule="scan"))
    p.parameters["write_noise"] = -p.parameters["write_noise"]
    with pytest.raises(ValueError, match="write_noise: expected variances > 0"):
        p.filter(stretch=stretch)
