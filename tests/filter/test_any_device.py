"""The chunk form in torch on any device: nothing waits for the device while it runs, one graph, shapes without values.

There is no GPU here. What would wait for one are the operations that bring a value to the host; a mode of the
dispatcher sees them on a CPU just as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import membydesign as mbd
from membydesign.filter import device_checks
from problems import DESIGNS, random_belief, random_problem

WAITING = {
    "_local_scalar_dense",  # .item(), float(x), bool(x)
    "is_nonzero",
    "equal",
    "nonzero",  # and what else has a shape that depends on values
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
}
CHUNK = {"method": "chunk", "backend": "torch", "chunk_size": 8}


class Waits(TorchDispatchMode):
    """Counts operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        to = kwargs.get("device")
        moved = name == "_to_copy" and to is not None and torch.device(to) != args[0].device
        sized = name == "repeat_interleave" and "output_size" not in kwargs
        if name in WAITING or moved or sized:
            self.seen.append(name)
        return func(*args, **kwargs)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Values are looked at as where that means waiting."""
    monkeypatch.setattr(device_checks, "AT_ONCE", ("meta",))
    monkeypatch.setattr("membydesign.design.diagonal._is_known", lambda _: False)


def waits_of(problem, **options) -> tuple[list[str], list[str]]:
    """What waits in forward and in backward."""
    for x in (problem.q, problem.k, problem.v, *problem.parameters.values()):
        x.requires_grad_()
    with Waits() as forward:
        out = problem.filter(**CHUNK, **options)
    loss = torch.stack([x.sum() for x in (out.output, *out.belief) if x is not None]).sum()
    with Waits() as backward:
        loss.backward()
    return forward.seen, backward.seen


@pytest.mark.parametrize("name", DESIGNS)
def test_nothing_waits_inside(as_on_a_gpu, name):
    """One look at the end, whatever the number of chunks; in float32 a dense filter looks once more, after them."""
    design = DESIGNS[name]
    for dtype in (torch.float32, torch.float64):
        looks = 1 + (name.startswith("dense") and dtype == torch.float32)
        for T in (8, 70):
            problem = random_problem(design, T=T, dtype=dtype)
            if "write_noise" in problem.parameters:
                problem.parameters["write_noise"] += 1.0  # no need to go on in float64
            initial = random_belief(design).map(lambda x, dtype=dtype: x.to(dtype))
            options = {"return_variance": design.has_variance, "return_evidence": True}
            forward, backward = waits_of(problem, initial=initial, **options)
            assert forward == ["_local_scalar_dense"] * looks, (dtype, T)
            assert not backward


def test_packed_sequences_wait_once_for_each_length(as_on_a_gpu):
    """Two batches of like length look twice, after their chunks, and then all of it once."""
    problem = random_problem(DESIGNS["dense-scalar"], B=1, T=70, dtype=torch.float32)
    problem.parameters["write_noise"] += 1.0
    forward, backward = waits_of(problem, cu_seqlens=torch.tensor([0, 8, 70], dtype=torch.int32))
    assert forward == ["_local_scalar_dense"] * 3
    assert not backward


def test_a_decoding_step_waits_once(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr("membydesign.filter.api.native_step", lambda *_: None)
    design = DESIGNS["dense-scalar"]
    problem, belief = random_problem(design), random_belief(design)
    with Waits() as waits:
        problem.step(belief, 0)
    assert waits.seen == ["_local_scalar_dense"]


BAD = {
    "q: expected finite values, got nan at batch 1, position 2, head 1": lambda p: p["q"][1, 2, 1].fill_(torch.nan),
    "write_noise: expected variances > 0, got -1": lambda p: p["write_noise"][0, 1, 0].fill_(-1.0),
    "process_noise: expected variances >= 0, got -0.5": lambda p: p["process_noise"][0, 1, 0].fill_(-0.5),
    "log_decay: expected log-decays <= 0": lambda p: p["log_decay"][0, 1, 0].fill_(0.1),
    "initial.mean: expected finite values": lambda p: p["mean"][0, 0].fill_(torch.inf),
    "initial.covariance: expected symmetric matrices": lambda p: p["covariance"][0, 0, 0, 0, 1].add_(1.0),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_values_are_refused_all_the_same(as_on_a_gpu, message):
    problem, initial = random_problem(DESIGNS["dense-scalar"]), random_belief(DESIGNS["dense-scalar"])
    BAD[message]({"q": problem.q, **problem.parameters, **initial._asdict()})
    with pytest.raises(ValueError, match=message):
        problem.filter(initial=initial, **CHUNK)


def test_indefinite_and_lost_covariances_are_reported_all_the_same(as_on_a_gpu):
    problem, initial = random_problem(DESIGNS["dense-scalar"]), random_belief(DESIGNS["dense-scalar"])
    assert initial.covariance is not None
    with pytest.raises(mbd.NotPositiveDefiniteError, match="initial.covariance: expected positive semi-definite"):
        problem.filter(initial=initial._replace(covariance=-initial.covariance), **CHUNK)
    huge = random_problem(DESIGNS["additive-identity"], dtype=torch.float32)
    huge.v.fill_(3e38)
    huge.k.fill_(1e3)
    with pytest.raises(mbd.NonFiniteError, match="output overflowed"):
        huge.filter(**CHUNK)
    negative = random_belief(DESIGNS["diagonal-scalar"])
    assert negative.covariance is not None
    with pytest.raises(ValueError, match="initial.covariance: expected variances of at least 0"):
        random_problem(DESIGNS["diagonal-scalar"]).filter(
            initial=negative._replace(covariance=-negative.covariance), **CHUNK
        )


@pytest.mark.parametrize("name", DESIGNS)
def test_meta(name):
    """Shapes and types come out where there are no values, also of gradients, and nothing is looked at."""
    design = DESIGNS[name]
    problem = random_problem(design, T=20).map(lambda x: x.to("meta"))
    forward, backward = waits_of(problem, return_variance=design.has_variance, return_evidence=True)
    assert not forward
    assert not backward
    assert problem.k.grad is not None
    assert problem.k.grad.is_meta
    out = problem.filter(**CHUNK)
    assert out.output.is_meta
    assert out.output.shape == (2, 20, 2, 4)


@pytest.mark.parametrize(
    "name",
    [
        "dense_2_groups-diagonal",
        pytest.param("diagonal-rotation_real", marks=pytest.mark.slow),
        "per_column_reset-identity",
        "additive_dense-diagonal",
    ],
)
def test_one_graph(name):
    """With variance and evidence, for rules and drifts that tests/filter/test_native.py does not compile."""
    torch.compiler.reset()
    design = DESIGNS[name]
    problem = random_problem(design, B=1, T=10)
    names = list(problem.parameters)

    def filtered(q, k, v, *parameters):
        step = dict(zip(names, parameters, strict=True))
        asked = {"return_variance": design.has_variance, "return_evidence": True}
        out = replace(problem, q=q, k=k, v=v, parameters=step).filter(**CHUNK, **asked)
        return [x for x in (out.output, *out.belief, out.variance, out.write_log_evidence) if x is not None]

    inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v, *problem.parameters.values())]
    results = []
    for run in (filtered, torch.compile(filtered, backend="aot_eager", fullgraph=True)):
        found = run(*inputs)
        weights = [torch.ones_like(x) for x in found]
        results.append([*found, *torch.autograd.grad(found, inputs, weights)])
    for compiled, expected in zip(*results, strict=True):
        torch.testing.assert_close(compiled, expected, rtol=1e-9, atol=1e-9)
