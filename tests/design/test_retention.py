"""PartialReset and Discounted: the contract, the two ends of the dial, and weighted least squares."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

from dataclasses import replace
from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign.testing import DesignContract, assert_close, random_problem

PARTIAL, DISCOUNTED = mbd.catalogue["partial_reset"], mbd.catalogue["discounted"]


class TestPartialReset(DesignContract):
    design = PARTIAL
    test_65536_tokens_in_float32: Any = None


class TestPartialResetOfRows(DesignContract):
    design = mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(groups=2), mbd.PartialReset(prior=1.5))
    test_65536_tokens_in_float32: Any = None


class TestPartialResetRotating(DesignContract):
    design = mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(), mbd.PartialReset())
    test_65536_tokens_in_float32: Any = None


class TestPartialResetInChunks(DesignContract):
    """What auto runs on a CPU, 65,536 tokens included; the loop takes minutes for those."""

    design = PARTIAL.replace(transition=mbd.DiagonalDecay())
    method = "chunk"
    backend = "auto"


class TestPartialResetInTorchChunks(DesignContract):
    design = PARTIAL
    method = "chunk"
    chunk_size = 4


class TestDiscounted(DesignContract):
    design = DISCOUNTED
    # directions that are not written grow without bound, and so do their errors
    test_65536_tokens_in_float32: Any = None


class TestDiscountedRotating(DesignContract):
    design = mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(groups=2), mbd.Discounted(prior=0.5))
    test_65536_tokens_in_float32: Any = None


def same_parameters(problem, **changes):
    return replace(problem, parameters={**problem.parameters, **changes})


def filtered(problem, **options):
    return problem.filter(return_variance=True, return_evidence=True, **options)


@pytest.mark.parametrize("method", ["recurrent", "chunk"])
@pytest.mark.parametrize("transition", [mbd.ScalarDecay(), mbd.DiagonalDecay(), mbd.DampedRotation()])
def test_nothing_retained_is_the_delta_rule(transition, method):
    """γ = 0 is Gated DeltaNet, for a rotation too; in outputs, means and densities."""
    problem = random_problem(PARTIAL.replace(transition=transition), T=40, D=6)
    problem = same_parameters(problem, retention=torch.zeros(2, 40, 2, dtype=torch.float64))
    rest = {name: x for name, x in problem.parameters.items() if name != "retention"}
    delta = replace(problem, design=mbd.catalogue["gated_deltanet"].replace(transition=transition), parameters=rest)
    ours, theirs = filtered(problem, method=method), filtered(delta, method="recurrent")
    assert_close(ours.output, theirs.output, 1e-12)
    assert_close(ours.belief.mean, theirs.belief.mean, 1e-12)
    assert_close(ours.variance, theirs.variance, 1e-12)
    assert_close(ours.write_log_evidence, theirs.write_log_evidence, 1e-12)


def test_nothing_retained_writes_with_the_gate_of_gated_deltanet():
    """S_t = a S_{t-1} + η k (v − a S_{t-1}ᵀ k)ᵀ with η = λ/(λ + r²) and unit keys, as that paper writes it."""
    problem = random_problem(PARTIAL, T=20)
    problem = replace(problem, k=torch.nn.functional.normalize(problem.k, dim=-1))
    problem = same_parameters(problem, retention=torch.zeros(2, 20, 2, dtype=torch.float64))
    lam, r2 = problem.parameters["prior_variance"], problem.parameters["write_noise"]
    gate, decay = lam / (lam + r2[..., 0]), problem.parameters["log_decay"].exp()
    S, outputs = torch.zeros(2, 2, 4, 4, dtype=torch.float64), []
    for t in range(20):
        k, v, q = problem.k[:, t], problem.v[:, t], problem.q[:, t]
        S = decay[:, t, :, None, None] * S
        error = v - torch.einsum("bhdm,bhd->bhm", S, k)
        S = S + gate[:, t, :, None, None] * k[..., None] * error[..., None, :]
        outputs.append(torch.einsum("bhdm,bhd->bhm", S, q))
    assert_close(problem.filter().output, torch.stack(outputs, 1), 1e-12)


@pytest.mark.parametrize("method", ["recurrent", "chunk"])
def test_everything_retained_is_the_stationary_filter(method):
    """γ = 1 is the Kalman filter with process noise λ(I − A Aᵀ), written out here."""
    problem = random_problem(PARTIAL.replace(transition=mbd.DiagonalDecay()), T=30, B=1, H=1)
    problem = same_parameters(problem, retention=torch.ones(1, 30, 1, dtype=torch.float64))
    M, P, outputs, variances = torch.zeros(4, 4).double(), torch.eye(4).double(), [], []
    for t in range(30):
        k, v, q = (x[0, t, 0] for x in (problem.k, problem.v, problem.q))
        lam, r2, log_decay = (problem.parameters[n][0, t, 0] for n in ("prior_variance", "write_noise", "log_decay"))
        A = torch.diag(log_decay.exp())
        M, P = A @ M, A @ P @ A.T + lam * (torch.eye(4) - A @ A.T)
        gain = P @ k / (k @ P @ k + r2)
        M, P = M + torch.outer(gain, v - M.T @ k), P - torch.outer(gain, P @ k)
        outputs.append(M.T @ q)
        variances.append(q @ P @ q)
    ours = filtered(problem, method=method)
    assert_close(ours.output[0, :, 0], torch.stack(outputs), 1e-12)
    assert_close(ours.variance[0, :, 0, 0], torch.stack(variances), 1e-12)
    assert_close(ours.belief.covariance[0, 0, 0], P, 1e-12)


@pytest.mark.parametrize("method", ["recurrent", "chunk"])
def test_discounting_solves_weighted_least_squares(method):
    """The mean minimises Σ_σ w_σ ‖v_σ − Mᵀ k_σ‖²/r_σ² + w_0 ‖M‖²/p₀, w_σ = Π_{ρ>σ} δ_ρ; P is the inverse Hessian."""
    problem = random_problem(DISCOUNTED, T=30, B=1, H=1)
    k, v, r2 = problem.k[0, :, 0], problem.v[0, :, 0], problem.parameters["write_noise"][0, :, 0, 0]
    since = problem.parameters["log_discount"][0, :, 0].cumsum(0)
    weights, of_prior = (since[-1] - since).exp() / r2, since[-1].exp()
    hessian = k.T @ (weights[:, None] * k) + of_prior * torch.eye(4)
    out = problem.filter(method=method)
    assert_close(out.belief.mean[0, 0], torch.linalg.solve(hessian, k.T @ (weights[:, None] * v)), 1e-10)
    assert_close(out.belief.covariance[0, 0, 0], torch.linalg.inv(hessian), 1e-10)


def test_without_a_discount_it_is_bayesian_linear_regression():
    problem = random_problem(DISCOUNTED, T=30, B=1, H=1)
    problem = same_parameters(problem, log_discount=torch.zeros(1, 30, 1, dtype=torch.float64))
    k, v, r2 = problem.k[0, :, 0], problem.v[0, :, 0], problem.parameters["write_noise"][0, :, 0, 0]
    covariance = torch.linalg.inv(k.T @ (k / r2[:, None]) + torch.eye(4))
    out = problem.filter()
    assert_close(out.belief.mean[0, 0], covariance @ k.T @ (v / r2[:, None]), 1e-12)
    joint = torch.distributions.MultivariateNormal(torch.zeros(30).double(), k @ k.T + torch.diag(r2))
    assert_close(problem.filter(return_evidence=True).log_evidence[0, 0], joint.log_prob(v.T).sum(), 1e-10)


def test_overflow_of_a_discount_is_an_error():
    problem = random_problem(DISCOUNTED, T=200, dtype=torch.float32)
    problem = same_parameters(problem, log_discount=torch.full((2, 200, 2), -1.0))
    problem = replace(problem, k=torch.zeros_like(problem.k))
    for method in ("recurrent", "chunk"):
        with pytest.raises(mbd.NonFiniteError):
            problem.filter(method=method)


def test_an_additive_write_is_refused():
    for covariance in (mbd.PartialReset(), mbd.Discounted()):
        with pytest.raises(ValueError, match="mean never reads a covariance, so there is nothing"):
            mbd.DesignModel(mbd.Identity(), mbd.LatentInput(), covariance)


def with_gradients(problem, **options):
    """Results and the gradients of their sum, by name."""
    names = ("q", "k", "v", *problem.parameters)
    leaves = {n: problem.parameters.get(n, getattr(problem, n, None)).clone().requires_grad_() for n in names}
    parameters = {n: leaves[n] for n in problem.parameters}
    problem = replace(problem, q=leaves["q"], k=leaves["k"], v=leaves["v"], parameters=parameters)
    out = problem.filter(return_variance=True, **options)
    (out.output.square().sum() + out.variance.sum() + out.belief.covariance.sum()).backward()
    return {"output": out.output, "variance": out.variance, **{n: x.grad for n, x in leaves.items()}}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("decay", [1.0, 60.0])  # the strong one is below 1e-20 within a few tokens
@pytest.mark.parametrize("transition", [mbd.ScalarDecay(), mbd.DiagonalDecay(), mbd.DampedRotation()])
def test_resets_between_other_tokens_have_exact_gradients(transition, decay, backend):
    """Retentions of 0, 1 and in between, over more tokens than backward keeps covariances for."""
    problem = random_problem(PARTIAL.replace(transition=transition), B=1, T=90, D=6)
    kind = torch.randint(4, (1, 90, 2), generator=torch.Generator().manual_seed(0))
    retention = torch.where(kind == 0, 0.0, torch.where(kind == 1, 1.0, problem.parameters["retention"]))
    problem = same_parameters(problem, retention=retention, log_decay=decay * problem.parameters["log_decay"])
    loop, ours = with_gradients(problem, method="recurrent"), with_gradients(problem, backend=backend)
    for name, expected in loop.items():
        assert_close(ours[name], expected, 1e-9, name)


def test_training_keeps_a_covariance_for_every_window_alone():
    """Saved for backward: D² numbers for every 64 tokens, not for every token."""
    D, T, saved = 64, 1024, []
    problem = random_problem(PARTIAL, B=1, H=1, T=T, D=D, M=4, dtype=torch.float32)
    problem = replace(problem, v=problem.v.requires_grad_(), k=problem.k.requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        problem.filter(backend="native")
    assert sum(saved) < T * D * D / 8


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_sure_writes_keep_their_digits_in_float32(backend):
    """r² = 1e-4 of the variance of memory: as exact as the loop."""
    problem = random_problem(PARTIAL, T=300, D=16, M=16, B=1)
    problem = replace(problem, k=torch.nn.functional.normalize(problem.k, dim=-1))
    noise = torch.full_like(problem.parameters["write_noise"], 1e-4)
    problem = same_parameters(problem, write_noise=noise).map(lambda x: x.float())
    precise, single = filtered(problem.map(lambda x: x.double())), filtered(problem, backend=backend)
    for name in ("output", "variance", "write_log_evidence"):
        ours, expected = getattr(single, name), getattr(precise, name)
        assert (ours - expected).abs().max() / (1 + expected.abs().max()) < 2e-6, name


def test_kernels_say_why_they_do_not_run():
    problem = random_problem(PARTIAL, T=5)
    problem = same_parameters(problem, retention=torch.zeros(2, 5, 2))
    from membydesign.filter.inputs import Inputs, Request
    from membydesign.filter.torch import forgetting

    x = Inputs(problem.q, problem.k, problem.v, problem.parameters)
    reason = forgetting.why_not(PARTIAL, Request(x, problem.prior(), torch.float64))
    assert reason is not None
    assert "more than a factor of 16" in reason
    other = forgetting.why_not(mbd.catalogue["kda"], Request(x, None, torch.float64))
    assert other is not None
    assert "forget" in other
