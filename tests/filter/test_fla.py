"""Designs without a covariance through flash-linear-attention: what it is given means what the loop means."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import membydesign as mbd
from fla_problems import OPERATIONS, assert_same, belief_for, everything, problem_of
from fla_stand_ins import STAND_INS
from membydesign.filter import fla
from membydesign.install import install_hint
from membydesign.testing import assert_close
from problems import DESIGNS, Problem, random_problem

WITH_FLA = importlib.util.find_spec("fla") is not None
needs_fla = pytest.mark.skipif(not WITH_FLA, reason="flash-linear-attention is not installed")


@pytest.fixture
def called(monkeypatch):
    """Stand-ins in the place of fla's kernels, on the CPU; the calls of them."""
    calls = []

    def operation(name):
        def run(**given):
            calls.append((name, given))
            return STAND_INS[name](**given)

        return run

    monkeypatch.setattr(fla, "operation", operation)
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    return calls


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_the_loop(called, name, dtype, tolerance):
    """Outputs, the memory at the end, and gradients of every input, from a memory that is not empty."""
    design = mbd.catalogue[name]
    problem = problem_of(design, dtype)
    initial = belief_for(design, problem)
    found = everything(problem, initial, backend="fla")
    assert [operation for operation, _ in called] == [OPERATIONS[name][dtype != torch.float32]]
    assert_same(found, everything(problem, initial, method="recurrent"), tolerance)


@pytest.mark.parametrize("name", OPERATIONS)
def test_packed_sequences_go_in_one_call(called, name):
    """Three with tokens and two without, whose memory stays what it is."""
    design = mbd.catalogue[name]
    problem = problem_of(design, B=1)
    initial = belief_for(design, problem, B=5)
    cu_seqlens = torch.tensor([0, 4, 4, 5, 13, 13], dtype=torch.int32)
    found = everything(problem, initial, backend="fla", cu_seqlens=cu_seqlens)
    assert len(called) == 1
    assert_same(found, everything(problem, initial, method="recurrent", cu_seqlens=cu_seqlens), 2e-6)
    whole = torch.tensor([0, 4, 13])
    two = initial.map(lambda x: x[:2])
    found = everything(problem, two, backend="fla", cu_seqlens=whole)
    assert_same(found, everything(problem, two, method="recurrent", cu_seqlens=whole), 2e-6)


def test_nothing_is_scaled_or_normalised(called):
    problem_of(mbd.catalogue["gated_deltanet"]).filter(backend="fla")
    [(_, given)] = called
    assert given["scale"] == 1.0
    assert set(given) == {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"}


def test_gains_above_one(called):
    """Short keys and a wide prior: β is far above 1, β‖k‖² is not, and the memory stays bounded."""
    design = mbd.catalogue["gated_deltanet"]
    problem = problem_of(design, T=40)
    problem = replace(problem, k=0.1 * problem.k)
    problem.parameters["prior_variance"].fill_(100.0)
    problem.parameters["write_noise"].fill_(0.1)
    initial = belief_for(design, problem)
    found = everything(problem, initial, backend="fla")
    assert called[0][1]["beta"].min() > 10
    assert_same(found, everything(problem, initial, method="recurrent"), 1e-5)


def test_the_variance_of_reads_is_ours(called):
    """A reset belief's variance needs inputs alone."""
    problem = problem_of(mbd.catalogue["kda"])
    found = problem.filter(backend="fla", return_variance=True).variance
    assert_close(found, problem.filter(method="recurrent", return_variance=True).variance, 1e-6)
    assert len(called) == 1


def test_numbers_as_parameters(called):
    """A parameter that is one number is the same at every token."""
    q, k, v = torch.randn(3, 2, 9, 3, 4).unbind()
    step = {"log_decay": -0.1, "prior_variance": 1.0, "write_noise": 0.0}
    problem = Problem(mbd.catalogue["mamba2"], q, k, v, {}, options=step)
    found, expected = problem.filter(backend="fla"), problem.filter(method="recurrent")
    assert_close(found.output, expected.output, 1e-5)
    assert len(called) == 1


REFUSED = {
    "dense-scalar": "for A design of your own, since Dense has no gains for whole sequences",
    "diagonal-scalar": "has no filter that keeps a covariance",
    "additive_dense-scalar": "has no filter that keeps a covariance",
    "per_column_reset-identity": "for gains that differ between value columns",
    "reset_2_groups-scalar": "for gains that differ between value columns",
    "reset-rotation": "for DampedRotation, since flash-linear-attention's memories only decay",
    "additive-rotation": "for DampedRotation",
}


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_designs_that_it_has_not(called, name, reason):
    problem = random_problem(DESIGNS[name], dtype=torch.float32)
    with pytest.raises(ValueError, match=f'backend: expected "auto" or "torch" .*{reason}.*, got "fla"'):
        problem.filter(backend="fla")
    assert not called


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunk_size": 16}, "with chunk_size=16, since flash-linear-attention chooses its own"),
        ({"return_evidence": True}, "with return_evidence=True"),
        ({"state_dtype": torch.float64}, "in float64"),
    ],
)
def test_options_that_it_has_not(called, monkeypatch, options, reason):
    """Refused where it was asked for, and left to torch otherwise."""
    monkeypatch.setattr(fla, "as_exact", lambda dtype: True)
    problem = problem_of(mbd.catalogue["kda"])
    with pytest.raises(ValueError, match=reason):
        problem.filter(backend="fla", **options)
    assert_close(problem.filter(**options).output, problem.filter(method="recurrent").output, 1e-5)
    assert not called


def test_large_keys_of_delta_rules(called):
    """Additive rules have no such limit."""
    with pytest.raises(ValueError, match="for D = 258, since flash-linear-attention's delta rules have D ≤ 256"):
        problem_of(mbd.catalogue["kda"], T=1, D=258).filter(backend="fla")
    problem_of(mbd.catalogue["gla"], T=1, D=258).filter(backend="fla")
    assert len(called) == 1


# What "auto" takes


@pytest.fixture
def allow_tf32():
    yield lambda: torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")


def test_auto_takes_it_where_it_rounds_no_more_than_torch(called, allow_tf32):
    half, single = (problem_of(mbd.catalogue["kda"], dtype) for dtype in (torch.bfloat16, torch.float32))
    single.filter()
    assert not called, "float32 products would be TF32's, which nobody allowed"
    half.filter()
    assert len(called) == 1
    allow_tf32()
    single.filter()
    assert len(called) == 2
    single.filter(backend="torch")
    single.filter(backend="native")
    single.filter(method="recurrent")
    assert len(called) == 2


def test_auto_leaves_a_whole_graph_to_torch_compile(called):
    problem = problem_of(mbd.catalogue["gated_deltanet"], torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(lambda: problem.filter().output, backend="eager", fullgraph=True)()
    assert not called
    assert_close(compiled, problem.filter(method="recurrent").output, 2e-2)


def test_on_a_cpu_it_is_refused_and_never_chosen(monkeypatch):
    """Also where it is installed: its kernels have no driver there."""
    monkeypatch.setattr(fla, "operation", lambda name: pytest.fail("looked for on a CPU"))
    problem = problem_of(mbd.catalogue["kda"], torch.bfloat16)
    with pytest.raises(
        ValueError, match='expected "auto" or "torch" for tensors on cpu, since .* run on GPUs, got "fla"'
    ):
        problem.filter(backend="fla")
    problem.filter()


def test_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fla.operation.cache_clear()
    problem = problem_of(mbd.catalogue["kda"], torch.bfloat16)
    missing = f"without flash-linear-attention's chunk_kda ({install_hint('fla')})"
    with pytest.raises(ValueError, match=re.escape(missing)):
        problem.filter(backend="fla")
    assert problem.filter().output.shape == problem.v.shape
    fla.operation.cache_clear()


def test_where_it_is_broken_one_line_says_so(monkeypatch):
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def broken(name):
        raise ImportError("no driver")

    monkeypatch.setattr(importlib, "import_module", broken)
    fla.operation.cache_clear()
    problem = problem_of(mbd.catalogue["kda"], torch.bfloat16)
    with pytest.warns(UserWarning, match="without flash-linear-attention's chunk_kda: no driver"):
        problem.filter()
    problem.filter()  # and no second time, which would be an error here
    fla.operation.cache_clear()


# The stand-ins are what they stand for


@needs_fla
@pytest.mark.filterwarnings("ignore")  # of a library that finds no GPU
@pytest.mark.parametrize("name", STAND_INS)
def test_arguments_are_those_of_the_real_functions(name):
    real = fla.operation(name)
    assert real is not None
    theirs, ours = inspect.signature(real).parameters, inspect.signature(STAND_INS[name]).parameters
    for argument, parameter in ours.items():
        assert argument in theirs, argument
        if argument != "initial_state" and parameter.kind != inspect.Parameter.VAR_KEYWORD:
            assert theirs[argument].default == parameter.default, argument


def reference(folder: str, function: str):
    """A function of fla's own references, from its file: they need no driver."""
    found = importlib.util.find_spec("fla")
    assert found is not None
    assert found.submodule_search_locations
    package = next(iter(found.submodule_search_locations))
    path = Path(package) / "ops" / folder / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{folder}_naive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def head_first(run):
    """A reference that has time after heads."""

    def wrapped(initial_state, **x):
        output, end = run(**{n: t.transpose(1, 2) for n, t in x.items()}, initial_state=initial_state)
        return output.transpose(1, 2), end

    return wrapped


@needs_fla
@pytest.mark.parametrize(
    ("name", "folder", "function"),
    [
        ("chunk_simple_gla", "simple_gla", "naive_recurrent_simple_gla"),
        ("chunk_gla", "gla", "naive_recurrent_gla"),
        ("chunk_delta_rule", "delta_rule", "delta_rule_recurrence"),
        ("chunk_gated_delta_rule", "gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        ("chunk_kda", "kda", "naive_recurrent_kda"),
    ],
)
def test_stand_ins_equal_the_references_of_fla(name, folder, function):
    """With the scale that it has by default, K^-1/2; outputs, ends and gradients."""
    B, T, H, K, V = 2, 9, 3, 6, 5
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if name == "chunk_delta_rule" else torch.float32
    q, k = (torch.randn(B, T, H, K, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    v = torch.randn(B, T, H, V, generator=generator).to(dtype).requires_grad_()
    decay = -torch.rand(*((B, T, H, K) if name in ("chunk_gla", "chunk_kda") else (B, T, H)), generator=generator)
    beta, start = torch.rand(B, T, H, generator=generator) / 6, torch.randn(B, H, K, V, generator=generator)
    inputs = {"q": q, "k": k, "v": v}
    gates = {} if name == "chunk_delta_rule" else {"g": decay.requires_grad_()}
    gates |= {"beta": beta.requires_grad_()} if "delta" in name or "kda" in name else {}
    run = reference(folder, function)
    run = head_first(run) if folder == "delta_rule" else run
    theirs = {"gk" if name == "chunk_gla" and n == "g" else n: x for n, x in gates.items()}
    asked = {} if folder == "delta_rule" else {"output_final_state": True}
    expected = run(**inputs, **theirs, initial_state=start.requires_grad_(), **asked)
    found = STAND_INS[name](**inputs, **gates, initial_state=start, output_final_state=True)
    leaves, results = [*inputs.values(), *gates.values(), start], []
    for pair in (found, expected):  # what comes out, and then a gradient of it for each leaf
        loss = torch.stack([x.float().sin().sum() for x in pair]).sum()
        results.append([*pair, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours.float(), theirs.float(), 2e-2 if dtype == torch.bfloat16 else 1e-5)
