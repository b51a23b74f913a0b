"""Relatives without a covariance against the equations of their papers: dense transition matrices, parallel forms."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import membydesign as mbd
from filter.test_recurrences import with_unit_keys
from membydesign import catalogue
from membydesign.testing import assert_close
from membydesign.testing.problems import random_problem

NAMES = ("gated_deltanet_2", "deltaproduct", "preconditioned_deltanet", "comba", "mlstm")
T, D = 11, 4
EYE = torch.eye(D, dtype=torch.float64)


def problem_for(design: mbd.Design, T: int = T, **options):
    return with_unit_keys(random_problem(design, T=T, D=D, M=3, **options))


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def reads_of(q: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """y_t = (Σ_s A_t … A_{s+1} B_s)ᵀ q_t: every write is carried to every later token by itself, [B,T,H,M]."""
    y = torch.zeros_like(B[..., 0, :])
    for s in range(B.shape[1]):
        carried = B[:, s]
        y[:, s] += (q[:, s, :, :, None] * carried).sum(-2)
        for t in range(s + 1, B.shape[1]):
            carried = A[:, t] @ carried
            y[:, t] += (q[:, t, :, :, None] * carried).sum(-2)
    return y


def gated_deltanet_2(x) -> Tensor:
    """S_t = (I − k_t (b_t ⊙ k_t)ᵀ) D_t S_{t-1} + k_t (w_t ⊙ v_t)ᵀ."""
    p = x.parameters
    A = (EYE - outer(x.k, p["erase_gate"] * x.k)) @ torch.diag_embed(p["log_decay"].exp())
    return reads_of(x.q, A, outer(x.k, p["write_gate"] * x.v))


def deltaproduct(x) -> Tensor:
    """A_t = g_t Π_j (I − β_tj k_tj k_tjᵀ),  B_t = Σ_j (Π_{i>j} (I − β_ti k_ti k_tiᵀ)) β_tj k_tj v_tjᵀ."""
    p = x.parameters
    keys = torch.cat((p["earlier_keys"], x.k[..., None, :]), -2)
    values = torch.cat((p["earlier_values"], x.v[..., None, :]), -2)
    A, B = p["log_decay"].exp()[..., None, None] * EYE, torch.zeros_like(outer(x.k, x.v))
    for j in range(keys.shape[-2]):
        k, v, beta = keys[..., j, :], values[..., j, :], 2 * p["gate"][..., j, None, None]
        factor = EYE - beta * outer(k, k)
        A, B = factor @ A, factor @ B + beta * outer(k, v)
    return reads_of(x.q, A, B)


def preconditioned_deltanet(x) -> Tensor:
    """Curvature as a sum over the past, its squashed inverse, and the delta rule along the scaled key."""
    p = x.parameters
    passed = p["curvature_log_decay"].cumsum(1)
    c = torch.zeros_like(x.k)
    for t in range(T):
        for s in range(t + 1):
            since = (passed[:, t] - passed[:, s]).exp()[..., None]
            c[:, t] += since * p["curvature_gate"][:, s, :, None] * x.k[:, s].square()
    r = torch.log(c + 1e-6) - p["log_center"][..., None]
    scaled = p["gate"][..., None] * 1.5 ** (-r / (1 + r.abs())) * x.k
    A = (EYE - outer(scaled, x.k)) * p["log_decay"].exp()[..., None, None]
    return reads_of(x.q, A, outer(scaled, x.v))


def comba(x) -> Tensor:
    """S_t = S_{t-1} (α_t − β̃_t k_t k_tᵀ) + β_t v_t k_tᵀ, here transposed."""
    p = x.parameters
    A = p["log_decay"].exp()[..., None, None] * EYE - p["feedback"][..., None, None] * outer(x.k, x.k)
    beta = p["prior_variance"] / (p["prior_variance"] + p["write_noise"])
    return reads_of(x.q, A, beta[..., None, None] * outer(x.k, x.v))


def mlstm(x) -> Tensor:
    """The paper's parallel form, without a stabiliser: weights D_ts = exp(Σ_{s<r≤t} log f_r + ĩ_s)."""
    passed, gate = x.parameters["log_decay"].cumsum(1), x.parameters["log_input"]
    weights = (passed[:, :, None] - passed[:, None] + gate[:, None]).exp()  # [B,t,s,H]
    weights = weights * torch.ones(T, T).tril()[:, :, None] * torch.einsum("bthd,bshd->btsh", x.q, x.k)
    return torch.einsum("btsh,bshm->bthm", weights, x.v) / weights.sum(2).abs().clamp(min=1)[..., None]


FORMULAS = {f.__name__: f for f in (gated_deltanet_2, deltaproduct, preconditioned_deltanet, comba, mlstm)}


@pytest.mark.parametrize("method", ["recurrent", "chunk"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_paper(name, method):
    design = mbd.MLSTMMemory(eps=0.0) if name == "mlstm" else catalogue[name]
    problem = problem_for(design)
    assert_close(problem.filter(method=method).output, FORMULAS[name](problem), 1e-10)


def scalar_problem(T: int = T):
    """Keys, values and the gates of Gated DeltaNet: log decays and β between 0 and 1."""
    problem = problem_for(catalogue["gated_deltanet"], T=T)
    beta = torch.rand(problem.k.shape[:-1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    beta = 0.1 + 0.8 * beta
    noise = mbd.theory.write_noise_of_gate(beta, problem.k, 1.0)
    return replace(
        problem, parameters={**problem.parameters, "prior_variance": beta * 0 + 1, "write_noise": noise}
    ), beta


def same_filter(problem, design: mbd.Design, parameters: dict[str, Tensor]):
    """The same q, k and v under another design."""
    return replace(problem, design=design, parameters=parameters).filter()


def test_gated_deltanet_is_the_special_case_of_three_relatives():
    problem, beta = scalar_problem()
    expected, a = problem.filter(), problem.parameters["log_decay"]
    no_gate = {"curvature_log_decay": a, "curvature_gate": beta, "log_center": a}
    for design, parameters in (
        (mbd.DeltaProduct(writes_per_token=1, largest_step=1.0), {"gate": beta[..., None]}),
        (mbd.PreconditionedDelta(range=1.0), {"gate": beta, **no_gate}),
        (catalogue["comba"], {"feedback": a.exp() * beta, "prior_variance": beta * 0 + 1, "write_noise": 1 / beta - 1}),
    ):
        out = same_filter(problem, design, {"log_decay": a, **parameters})
        assert_close(out.output, expected.output, 1e-12)
        assert_close(out.belief.mean, expected.belief.mean, 1e-12)


def test_kda_is_gated_deltanet_2_with_one_gate():
    problem, beta = scalar_problem()
    log_decay = -torch.rand(problem.k.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    noises = {name: problem.parameters[name] for name in ("prior_variance", "write_noise")}
    expected = same_filter(problem, catalogue["kda"], {"log_decay": log_decay, **noises})
    gates = {"erase_gate": beta[..., None].expand_as(problem.k), "write_gate": beta[..., None].expand_as(problem.v)}
    out = same_filter(problem, catalogue["gated_deltanet_2"], {"log_decay": log_decay, **gates})
    assert_close(out.output, expected.output, 1e-12)


def test_gated_deltanet_2_is_a_drift_that_erases_and_a_write_that_adds():
    """As a `DesignModel`: A_t = diag(α_t) − k_t (α_t ⊙ b_t ⊙ k_t)ᵀ, and the gated value as a noiseless input."""
    problem = problem_for(catalogue["gated_deltanet_2"])
    p = problem.parameters
    one = torch.ones_like(problem.k[..., 0])
    drift = {"removal_key": p["log_decay"].exp() * p["erase_gate"] * problem.k, "removal": problem.k}
    parameters = {"log_decay": p["log_decay"], **drift, "prior_variance": one, "write_noise": 0 * one}
    out = same_filter(replace(problem, v=p["write_gate"] * problem.v), catalogue["rwkv7"], parameters)
    assert_close(out.output, problem.filter().output, 1e-12)


def test_two_reflections_turn_memory():
    """β = 2 at two unit keys is a rotation by twice their angle, which a delta rule with β ≤ 1 cannot make."""
    angle = 0.3
    first, second = ([math.cos(x), math.sin(x)] for x in (0.0, angle))
    key = torch.tensor([first, second], dtype=torch.float64)
    start = torch.randn(1, 1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(1, 1, 1, 1, 3, dtype=torch.float64)
    out = mbd.filter_sequence(
        mbd.DeltaProduct(),
        key[1].view(1, 1, 1, 2),
        key[1].view(1, 1, 1, 2),
        zero[:, :, :, 0],
        initial=mbd.Belief(start),
        log_decay=0.0,
        gate=1.0,
        earlier_keys=key[0].view(1, 1, 1, 1, 2),
        earlier_values=zero,
    )
    cos, sin = math.cos(2 * angle), math.sin(2 * angle)
    turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    assert_close(out.belief.mean[0, 0], turn @ start[0, 0], 1e-12)


def test_mlstm_is_finite_where_its_gates_overflow():
    """Input gates of e^±200, in float32: the ratio of both sums is that of float64 without a stabiliser."""
    problem = problem_for(catalogue["mlstm"])
    gate = 200 * torch.sin(torch.arange(T, dtype=torch.float64))[None, :, None].expand(2, T, 2)
    parameters = {**problem.parameters, "log_input": gate}
    problem = replace(problem, design=mbd.MLSTMMemory(eps=0.0), parameters=parameters)
    single = problem.map(lambda x: x.float()).filter()
    assert torch.isfinite(single.output).all()
    assert_close(single.output.double(), mlstm(problem), 2e-5)


def test_the_step_of_a_preconditioned_write_stays_within_its_range():
    design = mbd.PreconditionedDelta(range=1.5)
    curvature = torch.tensor([0.0, 1e-6, 1e-3, 1.0, 1e6, 1e30], dtype=torch.float64)
    scale = design.scale(curvature, torch.tensor(-0.2, dtype=torch.float64))
    assert (scale.diff() <= 0).all()
    assert scale.min() >= 1 / 1.5
    assert scale.max() <= 1.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: mbd.DeltaProduct(writes_per_token=0),
            r"^DeltaProduct\(writes_per_token\): expected .*at least 1, got 0",
        ),
        (lambda: mbd.DeltaProduct(largest_step=2.5), r"^DeltaProduct\(largest_step\): expected .*at most 2, got 2.5"),
        (lambda: mbd.PreconditionedDelta(range=3.0), r"^PreconditionedDelta\(range\): expected .*from 1 to 2, got 3.0"),
        (lambda: mbd.PreconditionedDelta(eps=0.0), r"^PreconditionedDelta\(eps\): expected .*above 0, got 0.0"),
        (lambda: mbd.MLSTMMemory(eps=-1.0), r"^MLSTMMemory\(eps\): expected .*at least 0, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
