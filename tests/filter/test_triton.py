"""The Triton kernels, in Triton's interpreter (tests/conftest.py): equal to the loop over tokens in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign_bench import accuracy
from membydesign_bench.problem import Size
from problems import DESIGNS, random_belief, random_problem

pytest.importorskip("triton")
from kernel_checks.interpreter import faster
from membydesign.filter import api
from membydesign.filter.native import compiled
from membydesign.filter.torch import dense as chunk
from membydesign.filter.triton import dense as triton
from membydesign.filter.triton import kernel
from membydesign.filter.triton import step as triton_step
from membydesign.filter.triton import support as triton_support
from membydesign.filter.triton import table as triton_table

assert triton.interpreting
faster()

DENSE = [name for name in DESIGNS if name.startswith("dense")]
FLOAT64 = 1e-12
"""The same kernels in float64: only the order of sums differs."""

FLOAT32 = {
    # distance of the float32 kernels from the float64 loop, in units of one plus the largest value; this table
    # is in docs/internals/gpu.md
    "output": 5e-6,
    "mean": 5e-6,
    "covariance": 2e-6,
    "variance": 2e-6,
    "write_log_evidence": 1e-5,
    "log_evidence": 1e-5,
    "gradient": 3e-5,
}


@pytest.fixture(autouse=True)
def no_way_out(request, monkeypatch):
    """A test of the kernels fails if they hand their work to the torch form; the contract may."""
    if request.cls is None:
        monkeypatch.setattr(triton, "filter_chunk", None)


def moderate(problem):
    """Writes that are not much surer than memory: float32 in chunks is enough for them."""
    parameters = dict(problem.parameters)
    noise = "process_noise" if "process_noise" in parameters else "stationary_variance"
    parameters[noise] = 0.05 * parameters[noise]
    parameters["write_noise"] = 0.2 + parameters["write_noise"]
    return replace(problem, parameters=parameters)


def everything(problem, initial, leaves, **way):
    """All that a filter returns, and the gradient of a fixed random combination of it for every input."""
    out = problem.filter(initial=initial, return_variance=True, return_evidence=True, **way)
    found = {
        "output": out.output,
        "mean": out.belief.mean,
        "covariance": out.belief.covariance,
        "variance": out.variance,
        "write_log_evidence": out.write_log_evidence,
        "log_evidence": out.log_evidence,
    }
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in found.values()]
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), weights)
    return {**found, **{f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}}


def distances(name, T, D, M=4, *, dtype=torch.float32, change=lambda problem: problem, seed=0, **way):
    """How far the kernels are from the float64 loop, in everything."""
    design = DESIGNS[name]
    problem = change(moderate(random_problem(design, B=1, T=T, H=1, D=D, M=M, seed=seed)))
    problem = problem.map(lambda x: x.to(dtype))  # the loop gets what the kernels get
    initial = random_belief(design, B=1, H=1, D=D, M=M, seed=seed + 1).map(lambda x: (0.3 * x).to(dtype))
    found = []
    for wide, options in ((True, {"method": "recurrent"}), (False, {"backend": "triton", **way})):
        now = problem.map(lambda x, wide=wide: x.detach().to(torch.float64 if wide else dtype).requires_grad_())
        start = initial.map(lambda x, wide=wide: x.detach().to(torch.float64 if wide else dtype).requires_grad_())
        leaves = {"q": now.q, "k": now.k, "v": now.v, **now.parameters, "mean": start.mean}
        found.append(everything(now, start, {**leaves, "covariance": start.covariance}, **options))
    loop, fast = found
    assert loop.keys() == fast.keys()
    return {
        what: ((fast[what].double() - exact).abs().max() / (1 + exact.abs().max())).item()
        for what, exact in loop.items()
    }


def assert_within_table(found):
    for what, distance in found.items():
        assert distance <= FLOAT32[what.partition(" ")[0]], f"{what}: {distance:.1e}"


@pytest.mark.parametrize(
    "name",
    [
        "dense-identity",
        "dense-scalar",
        "dense-diagonal",
        "dense_2_groups-rotation_real",
        "dense-stationary_diagonal",
        "dense_2_groups-stationary_rotation_real",
    ],
)
def test_float64(name):
    """Three chunks, the last one ragged; the mathematics without rounding to speak of."""
    found = distances(name, 37, 16, dtype=torch.float64)
    assert max(found.values()) < FLOAT64, found


@pytest.mark.parametrize(
    ("name", "T", "D", "M"),
    [
        ("dense-identity", 20, 16, 4),
        ("dense-scalar", 33, 32, 20),
        ("dense-diagonal", 17, 64, 64),
        ("dense-rotation", 20, 32, 4),
        ("dense_2_groups-rotation_real", 20, 16, 6),
        ("dense_per_column-diagonal", 5, 12, 4),
        ("dense-scalar", 17, 128, 24),
        ("dense-stationary_diagonal", 17, 64, 64),
    ],
)
def test_float32(name, T, D, M):
    assert_within_table(distances(name, T, D, M))


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("T", "D", "M"), [(1, 2, 4), (40, 16, 16), (50, 32, 32), (50, 64, 64), (40, 128, 128)])
def test_float32_everywhere(name, T, D, M):
    assert_within_table(distances(name, T, D, M))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense-scalar", "dense_2_groups-rotation_real"])
def test_256_rows(name):
    assert_within_table(distances(name, 40, 256, 32))


@pytest.mark.parametrize("name", ["dense-diagonal", "dense_2_groups-rotation_real"])
def test_panels(name, monkeypatch):
    """P and M in memory, a few rows or columns at a time: the form for large D, here at a small one."""
    for which in ("FORWARD", "BACKWARD"):
        monkeypatch.setitem(getattr(triton_table, which), 32, (triton_table.Tiles(16, 16, 4),))
    found = distances(name, 20, 32, 40, dtype=torch.float64)
    assert max(found.values()) < FLOAT64, found


@pytest.mark.parametrize("name", ["dense-scalar", "dense-diagonal", "dense-rotation"])
@pytest.mark.parametrize("decay", ["1e-4 at every step", "alternating 1 and 1e-3"])
def test_strong_decays(name, decay):
    """No factor k/f is ever formed: decays of 1e-4 are as exact as others."""

    def strong(problem):
        log_decay = torch.full_like(problem.parameters["log_decay"], 1e-4).log()
        if decay.startswith("alternating"):
            log_decay = torch.zeros_like(log_decay)
            log_decay[:, 1::2] = torch.tensor(1e-3).log()
        return replace(problem, parameters={**problem.parameters, "log_decay": log_decay})

    assert_within_table(distances(name, 36, 16, change=strong))


def test_half_precision_inputs():
    """bf16 in and out, float32 inside: the same as float32 filters of the same numbers."""
    problem = moderate(random_problem(DESIGNS["dense-scalar"], B=1, H=1, T=20, D=16)).map(lambda x: x.bfloat16())
    out = problem.filter(backend="triton")
    assert out.output.dtype == torch.bfloat16
    assert out.belief.mean.dtype == torch.float32
    exact = problem.map(lambda x: x.double()).filter(method="recurrent")
    torch.testing.assert_close(out.output, exact.output.bfloat16())
    assert exact.belief.covariance is not None
    torch.testing.assert_close(out.belief.covariance, exact.belief.covariance.float(), atol=2e-6, rtol=0)


def test_packed_sequences():
    problem = moderate(random_problem(DESIGNS["dense-rotation"], B=1, H=1, T=40, D=16))
    cu_seqlens = torch.tensor([0, 17, 20, 40], dtype=torch.int32)
    exact = problem.filter(method="recurrent", cu_seqlens=cu_seqlens)
    out = problem.map(lambda x: x.float()).filter(backend="triton", cu_seqlens=cu_seqlens)
    torch.testing.assert_close(out.output.double(), exact.output, atol=5e-6, rtol=0)
    torch.testing.assert_close(out.belief.mean.double(), exact.belief.mean, atol=5e-6, rtol=0)


def test_tf32x3_is_an_option(monkeypatch):
    """The interpreter multiplies in float32 whatever is asked for; that it is asked for is all that can be seen."""
    problem = moderate(random_problem(DESIGNS["dense-identity"], B=1, H=1, T=5, D=16, dtype=torch.float32))
    exact = problem.filter(backend="triton").output
    requested = []
    forward = triton.OPERATOR.run
    monkeypatch.setattr(
        triton, "OPERATOR", triton.OPERATOR._replace(run=lambda *x: requested.append(x[-2]) or forward(*x))
    )
    monkeypatch.setenv("MEMBYDESIGN_INPUT_PRECISION", "tf32x3")
    torch.testing.assert_close(problem.filter(backend="triton").output, exact)
    assert requested == ["tf32x3"]
    monkeypatch.setenv("MEMBYDESIGN_INPUT_PRECISION", "tf32")
    with pytest.raises(ValueError, match='^MEMBYDESIGN_INPUT_PRECISION: expected "ieee" or "tf32x3", got \'tf32\''):
        problem.filter(backend="triton")


@pytest.mark.parametrize("name", ["dense-identity", "dense_2_groups-rotation_real"])
def test_torch_operator(name):
    """torch.library's own checks of the custom operator: schema, fake tensors, autograd registration."""
    design = DESIGNS[name]
    B, H, G, K, C, D, m = 1, 1, design.write.groups, 2, 16, 16, 2
    turns = design.transition == mbd.DampedRotation(noise="real")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    pair = normal(B, H, K, D // 2) if turns else None
    arguments = (
        *(normal(B, H, K, C, D) for _ in range(3)),
        *(normal(B, H, K, C, C).detach().mul(0.1).requires_grad_() for _ in range(2)),
        torch.full((B, H, G, K, C), 20.0).requires_grad_(),
        normal(B, H, G, K, C, m),
        torch.full((B, H, K, D), 0.9).requires_grad_(),
        torch.full((B, H, K, D), 0.1).requires_grad_(),
        None if pair is None else pair.detach().mul(0.01).requires_grad_(),
        pair,
        normal(B, H, G, D, m),
        torch.eye(D).expand(B, H, G, D, D).clone().requires_grad_(),
        True,
        True,
        "ieee",
        False,
        True,
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(compiled.OPERATORS["kalman_triton"], arguments, test_utils=tests)


def test_a_lost_covariance_is_reported(monkeypatch):
    """Near-duplicate keys, r² = 1e-9, float32: with the way out closed, a typed error that names the place."""
    monkeypatch.setattr(triton, "SURE", float("inf"))
    keys = near_duplicates()
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
    with pytest.raises(mbd.NotPositiveDefiniteError, match=r"at batch 0, position \d+, head 0, group 0"):
        mbd.filter_sequence(design, keys, keys, keys, process_noise=0.0, write_noise=1e-9, backend="triton")


def test_writes_too_sure_for_float32_go_on_in_float64(monkeypatch):
    monkeypatch.setattr(triton, "filter_chunk", chunk.filter_chunk)
    keys = near_duplicates()
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
    noises: dict[str, Any] = {"process_noise": 0.0, "write_noise": 1e-9}
    exact = mbd.filter_sequence(design, *[keys.double()] * 3, **noises, method="recurrent").output
    out = mbd.filter_sequence(design, keys, keys, keys, **noises, backend="triton").output
    torch.testing.assert_close(out, exact.float())


def near_duplicates():
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 16, generator=generator), dim=-1)
    return k + 1e-4 * torch.randn(1, 64, 1, 16, generator=generator)


@pytest.mark.parametrize("D", [6, 64])
@pytest.mark.parametrize(
    "name", ["dense-identity", "dense-scalar", "dense_2_groups-diagonal", "dense-rotation", "dense-rotation_real"]
)
def test_decoding_step(name, D, monkeypatch):
    """Step after step of the decoding kernel equals the sequence, with P on chip and in panels."""
    design = DESIGNS[name]
    problem = random_problem(design, B=1, T=3, H=2, D=D, M=6)
    if D == 64:
        monkeypatch.setitem(triton_table.STEP, 64, (triton_table.Tiles(16, 16, 4),))
    exact = problem.filter(method="recurrent")
    monkeypatch.setattr(kernel, "fits", lambda _: True)
    monkeypatch.setattr(api, "native_step", lambda *_: None)
    belief = mbd.Belief.prior(design, 1, 2, D, 6, dtype=torch.float64)
    calls = []
    step = triton_step.step_triton
    monkeypatch.setattr(triton_step, "step_triton", lambda *args, **options: calls.append(1) or step(*args, **options))
    for t in range(3):
        y, belief = problem.step(belief, t)
        torch.testing.assert_close(y, exact.output[:, t])
    assert len(calls) == 3
    torch.testing.assert_close(belief.mean, exact.belief.mean)
    torch.testing.assert_close(belief.covariance, exact.belief.covariance)


def test_second_derivatives_are_refused():
    problem = random_problem(DESIGNS["dense-identity"], B=1, H=1, T=3)
    problem.k.requires_grad_()
    loss = problem.filter(backend="triton").output.square().sum()
    (gradient,) = torch.autograd.grad(loss, problem.k, create_graph=True)
    with pytest.raises(RuntimeError, match='can be differentiated once.*use backend="torch"'):
        torch.autograd.grad(gradient.sum(), problem.k)


def test_gradients_of_each_sample():
    """torch.vmap over torch.func.grad: samples are folded into the batch."""
    problem = random_problem(DESIGNS["dense_2_groups-rotation"], T=18)

    def gradients(backend: str) -> torch.Tensor:
        def loss(k: torch.Tensor) -> torch.Tensor:
            one = replace(problem.map(lambda x: x[:1]), k=k[None])
            return one.filter(backend=backend).output.square().sum()

        return torch.func.vmap(torch.func.grad(loss))(problem.k)

    torch.testing.assert_close(gradients("triton"), gradients("torch"))


def test_what_the_kernels_cannot_do_is_refused(monkeypatch):
    problem = random_problem(DESIGNS["reset-scalar"], T=3)
    with pytest.raises(
        ValueError, match='^backend: expected "auto" or "torch" for .*, since this kernel propagates a dense'
    ):
        problem.filter(backend="triton")
    problem = random_problem(DESIGNS["dense-scalar"], T=3)
    with pytest.raises(
        ValueError, match='^backend: .* with chunk_size=8, since the kernels have chunks of 16, got "triton"'
    ):
        problem.filter(backend="triton", chunk_size=8)
    with pytest.raises(ValueError, match='^backend: expected "auto" or "torch" for keys of size 512'):
        random_problem(DESIGNS["dense-scalar"], B=1, H=1, T=1, D=512).filter(backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(
        ValueError, match='^backend: expected "auto" or "torch" for tensors on cpu, since Triton needs a GPU'
    ):
        problem.filter(backend="triton")
    monkeypatch.setattr(triton_support, "version", lambda: None)
    with pytest.raises(ValueError, match='^backend: expected one that is installed, got "triton": pip install'):
        problem.filter(backend="triton")


def test_cpu_tensors_never_load_triton():
    program = """
import sys, torch, membydesign as mbd
q, k, v = torch.randn(3, 1, 5, 2, 4).unbind()
design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
mbd.filter_sequence(design, q, k, v, process_noise=0.1, write_noise=0.1)
assert "triton" not in sys.modules and "membydesign.filter.triton.dense" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


class TestHardStreams:
    """Where float32 is hard pressed, the kernels and what they hand on in float64 lose no more than the loop does."""

    @pytest.mark.parametrize("name", accuracy.STREAMS)
    @pytest.mark.parametrize("D", [16, 64])
    def test_no_more_is_lost_than_in_the_loop(self, name, D, monkeypatch):
        monkeypatch.setattr(accuracy, "METHODS", {"loop": {"method": "recurrent"}, "kernels": {"backend": "triton"}})
        found = accuracy.distances(accuracy.STREAMS[name], Size(1, 1, 100, D))
        loop, kernels = found["loop"], found["kernels"]
        assert loop is not None
        assert kernels is not None
        for quantity, value in kernels._asdict().items():
            assert value <= max(2 * getattr(loop, quantity), 1e-6), f"{quantity}: {value:.1e}, loop {loop}"


def test_an_unknown_scale_follows_from_the_kernels():
    design = mbd.UnknownScale(DESIGNS["dense_2_groups-diagonal"])
    problem = moderate(random_problem(design, B=1, T=37, H=1))
    options = {"return_variance": True, "return_evidence": True}
    reference = problem.filter(method="recurrent", **options)
    ours = problem.filter(backend="triton", **options)
    for name in ("output", "variance", "write_log_evidence"):
        torch.testing.assert_close(getattr(ours, name), getattr(reference, name), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.belief.rate, reference.belief.rate, rtol=1e-10, atol=1e-10)
