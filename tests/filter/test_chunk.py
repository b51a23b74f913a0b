"""Chunk form and native code equal the loop over tokens: outputs, beliefs, variance, evidence and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import membydesign as mbd
from problems import DESIGNS, random_belief, random_problem

TOLERANCE = 1e-11
WAYS = [
    {"method": "recurrent"},
    {"method": "chunk", "backend": "torch"},
    {"method": "chunk", "backend": "native"},
    {"method": "chunk", "backend": "native", "chunk_size": 64},
]


def everything(problem, initial, leaves, **way):
    """All that a filter returns, and the gradient of a fixed random combination of it for every input."""
    out = problem.filter(initial=initial, return_variance=problem.design.has_variance, return_evidence=True, **way)
    found = {
        "output": out.output,
        "mean": out.belief.mean,
        "covariance": out.belief.covariance,
        "variance": out.variance,
        "write_log_evidence": out.write_log_evidence,
        "log_evidence": out.log_evidence,
    }
    found = {name: x for name, x in found.items() if x is not None}
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in found.values()]
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), weights)
    return {**found, **{f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}}


def assert_equals_loop(name: str, T: int, seed: int, D: int = 4, **way) -> None:
    design = DESIGNS[name]
    problem = random_problem(design, T=T, D=D, seed=seed)
    initial = random_belief(design, D=D, seed=seed + 1)
    leaves = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters, "mean": initial.mean}
    if initial.covariance is not None:
        leaves["covariance"] = initial.covariance
    for x in leaves.values():
        x.requires_grad_()
    loop = everything(problem, initial, leaves, method="recurrent")
    fast = everything(problem, initial, leaves, method="chunk", **way)
    assert loop.keys() == fast.keys()
    for what, reference in loop.items():
        distance = ((fast[what] - reference).abs().max() / (1 + reference.abs().max())).item()
        assert distance <= TOLERANCE, f"{what}: {distance:.1e}"


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize(("T", "chunk_size"), [(1, None), (7, 64), (20, 7), (70, None)])
def test_chunk_equals_loop(name, T, chunk_size):
    """One token, fewer than a chunk, a ragged last chunk, several sub-blocks."""
    assert_equals_loop(name, T, seed=T, backend="torch", chunk_size=chunk_size)


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize(
    ("T", "D", "chunk_size"), [(1, 4, None), (15, 16, None), (33, 6, None), (40, 32, None), (5, 2, 3), (70, 34, 33)]
)
def test_native_equals_loop(name, T, D, chunk_size):
    """One token; fewer and more tokens than a chunk or than between two saved beliefs; odd sizes of everything."""
    assert_equals_loop(name, T, seed=T, D=D, backend="native", chunk_size=chunk_size)


@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(DESIGNS)),
    T=st.integers(1, 90),
    chunk_size=st.integers(1, 40),
    pairs=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_any_length_and_chunk_size(name, T, chunk_size, pairs, seed):
    assert_equals_loop(name, T, seed, D=2 * pairs, backend="torch", chunk_size=chunk_size)
    assert_equals_loop(name, T, seed, D=2 * pairs, backend="native", chunk_size=chunk_size)


@pytest.mark.parametrize("name", [name for name in DESIGNS if "identity" not in name])
@pytest.mark.parametrize("decay", ["1e-4 at every step", "alternating 1 and 1e-3"])
def test_strong_decays_in_float32(name, decay):
    """No factor k/f is ever formed: strong decays lose no more than the loop does."""
    design = DESIGNS[name]
    problem = random_problem(design, T=128, D=8)
    log_decay = torch.full_like(problem.parameters["log_decay"], 1e-4).log()
    if decay.startswith("alternating"):
        log_decay = torch.zeros_like(log_decay)
        log_decay[:, 1::2] = torch.tensor(1e-3).log()
    problem.parameters["log_decay"] = log_decay
    exact = problem.filter(method="recurrent")
    single = problem.map(lambda x: x.float())
    for way in WAYS:
        out = single.filter(**way)
        error = ((out.output.double() - exact.output).abs().max() / (1 + exact.output.abs().max())).item()
        assert error < 3e-6, way


def test_a_transition_of_another_form_goes_token_by_token():
    class Swap(mbd.Transition):
        """Exchanges the halves of memory: neither a decay of rows nor a rotation of neighbours."""

        @property
        def matrix(self):
            return mbd.Equation("A = swap", r"\mathbf{A} = \mathrm{swap}")

        def apply(self, x, step):
            return x.roll(x.shape[-2] // 2, -2)

    design = mbd.DesignModel(Swap(), mbd.ObserveMemory(), mbd.Dense())
    problem = random_problem(design)
    assert torch.equal(problem.filter(method="chunk").output, problem.filter(method="recurrent").output)


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, True])
def test_bad_chunk_sizes_are_refused(chunk_size):
    with pytest.raises(ValueError, match="chunk_size: expected a whole number of at least 1"):
        random_problem(DESIGNS["dense-identity"]).filter(chunk_size=chunk_size)


def test_unknown_backends_are_refused():
    with pytest.raises(
        ValueError, match='backend: expected "auto", "torch", "native", "triton" or "fla", got \'cuda\''
    ):
        random_problem(DESIGNS["dense-identity"]).filter(backend="cuda")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", [False, True])
def test_a_lost_covariance_is_reported_or_not_lost(way, train):
    """Near-duplicate keys, r² = 1e-9, float32: no way of filtering returns wrong numbers for it."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 16, generator=generator), dim=-1)
    k = k + 1e-4 * torch.randn(1, 200, 1, 16, generator=generator)
    k.requires_grad_(train)
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
    noises = {"process_noise": 0.0, "write_noise": 1e-9}
    if way.get("backend") == "torch":  # which goes on in float64 by itself
        exact = mbd.filter_sequence(design, *[k.detach().double()] * 3, **noises, method="recurrent").output
        torch.testing.assert_close(mbd.filter_sequence(design, k, k, k, **noises, **way).output, exact.float())
        return
    with pytest.raises(mbd.NotPositiveDefiniteError, match=r"at batch 0, position \d+, head 0, group 0"):
        mbd.filter_sequence(design, k, k, k, **noises, **way)


def test_the_chunk_form_runs_on_the_meta_device():
    """No value is looked at inside: shapes come out where there are no numbers."""
    problem = random_problem(DESIGNS["dense-diagonal"], T=20).map(lambda x: x.to("meta"))
    out = problem.filter(method="chunk", chunk_size=8, return_variance=True)
    assert out.output.is_meta
    assert out.output.shape == (2, 20, 2, 4)


def test_training_keeps_only_the_boundaries():
    """What autograd saves is boundary beliefs and a few numbers per token, far from a D×D matrix for every token."""
    design = DESIGNS["dense-scalar"]
    D, T = 64, 256
    problem = random_problem(design, B=1, H=1, T=T, D=D, M=8, dtype=torch.float32)
    problem.parameters["write_noise"].fill_(10.0)  # no need to go on in float64
    for x in (problem.q, problem.k, problem.v):
        x.requires_grad_()
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        problem.filter(method="chunk", backend="torch", chunk_size=32)
    boundaries = T // 32 * (D * D + D * 8)
    assert sum(saved.values()) < 3 * boundaries + 20 * T * (D + 32)
    assert sum(saved.values()) < T * D * D / 2


class TurningTogether(mbd.Transition):
    """All pairs of rows turn by their own angles and fade at one rate."""

    step_parameters = mbd.DampedRotation.step_parameters

    @property
    def matrix(self):
        return mbd.Equation("A = ρ R(θ)", r"\mathbf{A} = \rho\mathbf{R}(\theta)")

    def apply(self, x, step):
        shared = step["log_decay"][..., :1].expand_as(step["angle"])
        return mbd.DampedRotation().apply(x, {"log_decay": shared, "angle": step["angle"]})

    def row_drift(self, parameters, k):
        return mbd.RowDrift(parameters["log_decay"][..., :1], parameters["angle"])


@pytest.mark.parametrize("rule", ["dense", "diagonal", "reset", "additive"])
@pytest.mark.parametrize("way", WAYS)
def test_one_decay_for_all_pairs_that_turn(rule, way):
    """A transition of one's own may share the decay and not the angles."""
    like = DESIGNS[f"{rule}-rotation"]
    problem = random_problem(mbd.DesignModel(TurningTogether(), like.write, like.covariance), T=20, D=8)
    torch.testing.assert_close(problem.filter(**way).output, problem.filter(method="recurrent").output)
