"""Each row of Table 1 equals a formula written from that architecture's own paper, in that paper's letters.

States are written as those papers write them (some as values × keys), and where a paper has a form that is not a
recurrence (a masked quadratic form, an optimisation problem), that form is the reference.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import membydesign as mbd
from membydesign import Belief, catalogue, theory
from membydesign.testing import assert_close
from problems import random_problem

B, T, H, D, M = 2, 11, 3, 4, 6
EXACT = 1e-12


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, H, D, generator=generator, dtype=torch.float64)
    k = torch.nn.functional.normalize(torch.randn(B, T, H, D, generator=generator, dtype=torch.float64), dim=-1)
    v = torch.randn(B, T, H, M, generator=generator, dtype=torch.float64)
    return q, k, v, generator


def filtered(design: mbd.DesignModel, *inputs: Tensor, **options: Any) -> mbd.Filtered:
    """The specification, after making sure that the default way gives the same."""
    loop = mbd.filter_sequence(design, *inputs, **options, method="recurrent")
    fast = mbd.filter_sequence(design, *inputs, **options)
    assert_close(fast.output, loop.output, EXACT)
    assert_close(fast.belief.mean, loop.belief.mean, EXACT)
    return loop


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return 0.05 + 0.9 * torch.rand(*shape, generator=generator, dtype=torch.float64)


seeds = given(seed=st.integers(0, 2**20))
few = settings(max_examples=8)


@few
@seeds
def test_deltanet(seed):
    """Schlag et al. 2021; Yang et al. 2024: S_t = S_{t-1}(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t."""
    q, k, v, generator = draw(seed)
    beta = uniform(generator, B, T, H)
    noise = theory.write_noise_of_gate(beta, k)
    ours = filtered(catalogue["deltanet"], q, k, v, prior_variance=1.0, write_noise=noise)
    S = torch.zeros(B, H, M, D, dtype=torch.float64)
    for t in range(T):
        kk = k[:, t, :, :, None] * k[:, t, :, None, :]
        b = beta[:, t, :, None, None]
        S = S @ (torch.eye(D) - b * kk) + b * v[:, t, :, :, None] * k[:, t, :, None, :]
        assert_close(ours.output[:, t], (S @ q[:, t, :, :, None]).squeeze(-1), EXACT)
    assert_close(ours.belief.mean, S.mT, EXACT)


@few
@seeds
def test_gated_deltanet(seed):
    """Yang, Kautz & Hatamizadeh 2025: S_t = S_{t-1}(α_t(I − β_t k_t k_tᵀ)) + β_t v_t k_tᵀ."""
    q, k, v, generator = draw(seed)
    alpha, beta = uniform(generator, B, T, H), uniform(generator, B, T, H)
    noise = theory.write_noise_of_gate(beta, k, prior_variance=0.3)
    ours = filtered(catalogue["gated_deltanet"], q, k, v, prior_variance=0.3, write_noise=noise, log_decay=alpha.log())
    S = torch.zeros(B, H, M, D, dtype=torch.float64)
    for t in range(T):
        kk = k[:, t, :, :, None] * k[:, t, :, None, :]
        a, b = alpha[:, t, :, None, None], beta[:, t, :, None, None]
        S = S @ (a * (torch.eye(D) - b * kk)) + b * v[:, t, :, :, None] * k[:, t, :, None, :]
        assert_close(ours.output[:, t], (S @ q[:, t, :, :, None]).squeeze(-1), EXACT)


@few
@seeds
def test_kda(seed):
    """Kimi Team 2025: S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t."""
    q, k, v, generator = draw(seed)
    alpha, beta = uniform(generator, B, T, H, D), uniform(generator, B, T, H)
    noise = theory.write_noise_of_gate(beta, k)
    ours = filtered(catalogue["kda"], q, k, v, prior_variance=1.0, write_noise=noise, log_decay=alpha.log())
    S = torch.zeros(B, H, D, M, dtype=torch.float64)
    for t in range(T):
        k_t, b = k[:, t, :, :, None], beta[:, t, :, None, None]
        S = (torch.eye(D) - b * k_t @ k_t.mT) @ torch.diag_embed(alpha[:, t]) @ S + b * k_t @ v[:, t, :, None, :]
        assert_close(ours.output[:, t], (S.mT @ q[:, t, :, :, None]).squeeze(-1), EXACT)


@few
@seeds
def test_longhorn(seed):
    """Liu et al. 2025: S_t minimises ‖S − S_{t-1}‖² + ‖S k_t − x_t‖²_diag(β_t); by its normal equations."""
    q, k, v, generator = draw(seed)
    k = k * (0.5 + uniform(generator, B, T, H, 1))  # Longhorn does not normalise its keys
    beta = uniform(generator, B, T, H, M)
    ours = filtered(catalogue["longhorn"], q, k, v, prior_variance=beta, write_noise=1.0)
    S = torch.zeros(B, H, M, D, dtype=torch.float64)
    for t in range(T):
        k_t = k[:, t, :, None, :]
        # Row i of S: (I + β_i k kᵀ) s_i = s_i' + β_i x_i k
        for i in range(M):
            b_i = beta[:, t, :, i, None, None]
            normal = torch.eye(D) + b_i * k_t.mT @ k_t
            target = S[:, :, i, :, None] + b_i * v[:, t, :, i, None, None] * k_t.mT
            S[:, :, i] = torch.linalg.solve(normal, target).squeeze(-1)
        assert_close(ours.output[:, t], (S @ q[:, t, :, :, None]).squeeze(-1), EXACT)


@few
@seeds
def test_linear_attention(seed):
    """Katharopoulos et al. 2020 (numerator): o_i = Σ_{j ≤ i} (q_iᵀ k_j) v_j, a masked quadratic form."""
    q, k, v, _ = draw(seed)
    ours = filtered(catalogue["linear_attention"], q, k, v, prior_variance=1.0, write_noise=0.0)
    scores = torch.einsum("bihd,bjhd->bhij", q, k).tril()
    assert_close(ours.output, torch.einsum("bhij,bjhm->bihm", scores, v), EXACT)


@few
@seeds
def test_retnet(seed):
    """Sun et al. 2023: Retention(X) = (Q Kᵀ ⊙ D) V with D_nm = γ^{n−m} for n ≥ m; γ = 1 − 2^{−5−h}."""
    q, k, v, _ = draw(seed)
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    ours = filtered(
        catalogue["retnet"], q, k, v, prior_variance=1.0, write_noise=0.0, log_decay=gamma.log().expand(B, T, H)
    )
    n = torch.arange(T)
    mask = (gamma[:, None, None] ** (n[:, None] - n[None, :])).tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * mask
    assert_close(ours.output, torch.einsum("bhij,bjhm->bihm", scores, v), EXACT)


@few
@seeds
def test_gla(seed):
    """Yang et al. 2024: S_t = (α_tᵀ 1) ⊙ S_{t-1} + k_tᵀ v_t; parallel form (Q ⊙ B)(K / B)ᵀ with B_t = Π α."""
    q, k, v, generator = draw(seed)
    alpha = uniform(generator, B, T, H, D)
    ours = filtered(catalogue["gla"], q, k, v, prior_variance=2.0, write_noise=0.0, log_decay=alpha.log())
    b = alpha.cumprod(1)
    scores = torch.einsum("bihd,bjhd->bhij", q * b, k / b).tril()
    assert_close(ours.output, torch.einsum("bhij,bjhm->bihm", scores, v), 1e-9)


@few
@seeds
def test_mamba2(seed):
    """Dao & Gu 2024: Y = (L ∘ C Bᵀ) X with L_ij = a_i ⋯ a_{j+1}, X the discretised Δ_t x_t."""
    C, b, x, generator = draw(seed)
    delta = uniform(generator, B, T, H)
    log_a = -delta * uniform(generator, H)
    ours = filtered(
        catalogue["mamba2"], C, b, delta[..., None] * x, prior_variance=1.0, write_noise=0.0, log_decay=log_a
    )
    cumulated = log_a.cumsum(1)
    L = (cumulated[:, :, None] - cumulated[:, None, :]).permute(0, 3, 1, 2).exp().tril()
    scores = torch.einsum("bihd,bjhd->bhij", C, b) * L
    expected = torch.einsum("bhij,bjhm->bihm", scores, delta[..., None] * x)
    assert_close(ours.output, expected, EXACT)


@few
@seeds
def test_additive_trust(seed):
    """A noisy latent input weighs its value: ω_t = λ_t/(λ_t + r_t²), the appendix on the latent-input model."""
    q, k, v, generator = draw(seed)
    prior, noise = uniform(generator, B, T, H), uniform(generator, B, T, H)
    design = catalogue["linear_attention"]
    noisy = filtered(design, q, k, v, prior_variance=prior, write_noise=noise)
    omega = prior / (prior + noise)
    plain = filtered(design, q, k, omega[..., None] * v, prior_variance=1.0, write_noise=0.0)
    assert_close(noisy.output, plain.output, EXACT)


@few
@seeds
def test_bayesian_layer_without_drift_is_ridge_regression(seed):
    """ℓ² = 0, A = I: the filter is regularised least squares, M = (Σ kkᵀ/r² + I/p₀)⁻¹ Σ k vᵀ/r² (no recursion)."""
    q, k, v, generator = draw(seed)
    noise = uniform(generator, B, T, H)
    design = catalogue["bayesian_layer"].replace(transition=mbd.Identity(), covariance=mbd.Dense(prior=2.0))
    ours = filtered(design, q, k, v, process_noise=0.0, write_noise=noise)
    precision = torch.einsum("bthd,bthe->bhde", k / noise[..., None], k) + torch.eye(D) / 2.0
    moment = torch.einsum("bthd,bthm->bhdm", k / noise[..., None], v)
    assert_close(ours.belief.mean, torch.linalg.solve(precision, moment), 1e-10)
    assert ours.belief.covariance is not None
    assert_close(ours.belief.covariance[:, :, 0], torch.linalg.inv(precision), 1e-10)


@pytest.mark.parametrize("transition", [mbd.Identity(), mbd.ScalarDecay(), mbd.DiagonalDecay(), mbd.DampedRotation()])
@pytest.mark.parametrize("groups", [1, 2])
def test_isotropic_reset_is_an_identity_of_code(transition, groups):
    """Proposition 2: the dense filter, with its predicted covariance replaced by λ_t I, is the reset design.

    A dense step with process noise 0 and identity drift predicts exactly the covariance it was given. So each token is
    one dense step from (A_t M_{t-1}, λ_t I).
    """
    write = mbd.ObserveMemory(groups=groups)
    reset = mbd.DesignModel(transition, write, mbd.Reset())
    dense = mbd.DesignModel(mbd.Identity(), write, mbd.Dense())
    problem = random_problem(reset, B=B, T=T, H=H, D=D, M=M)
    ours = problem.filter(return_variance=True, return_evidence=True)
    assert ours.variance is not None
    assert ours.write_log_evidence is not None
    mean = torch.zeros(B, H, D, M, dtype=torch.float64)
    for t in range(T):
        now = {name: x[:, t] for name, x in problem.parameters.items()}
        drifted = transition.apply(mean, now)
        isotropic = now["prior_variance"][..., None, None, None] * torch.eye(D, dtype=torch.float64)
        out = filtered(
            dense,
            *(x[:, t : t + 1] for x in (problem.q, problem.k, problem.v)),
            process_noise=0.0,
            write_noise=problem.parameters["write_noise"][:, t : t + 1],
            initial=Belief(drifted, isotropic.expand(B, H, groups, D, D)),
            return_variance=True,
            return_evidence=True,
        )
        assert out.variance is not None
        mean = out.belief.mean
        assert_close(out.output[:, 0], ours.output[:, t], EXACT)
        assert_close(out.variance[:, 0], ours.variance[:, t], EXACT)
        assert_close(out.log_evidence, ours.write_log_evidence[:, t], EXACT)
    assert_close(mean, ours.belief.mean, EXACT)


@pytest.mark.parametrize("transition", [mbd.Identity(), mbd.DiagonalDecay(), mbd.DampedRotation(noise="real")])
def test_diagonal_covariance_as_the_paper_defines_it(transition):
    """ "Setting every off-diagonal entry of P_t to zero after each update": written out with matrices, one head."""
    from membydesign.testing.oracles import noise_matrices, transition_matrices

    problem = random_problem(mbd.DesignModel(transition, mbd.ObserveMemory(), mbd.Diagonal(2.0)), B=1, H=1, D=D, T=T)
    ours = problem.filter()
    A, Q = transition_matrices(problem, 0, 0), noise_matrices(problem, 0, 0)
    mean, P = torch.zeros(D, 4, dtype=torch.float64), 2.0 * torch.eye(D, dtype=torch.float64)
    for t in range(T):
        k, v = problem.k[0, t, 0], problem.v[0, t, 0]
        P = A[t] @ P @ A[t].T + Q[t]
        gain = P @ k / (problem.parameters["write_noise"][0, t, 0, 0] + k @ P @ k)
        mean = A[t] @ mean
        mean = mean + torch.outer(gain, v - mean.T @ k)
        P = torch.diag(torch.diag(P - torch.outer(gain, P @ k)))
        assert_close(ours.output[0, t, 0], mean.T @ problem.q[0, t, 0], EXACT)
    assert ours.belief.covariance is not None
    assert_close(ours.belief.covariance[0, 0, 0], torch.diag(P), EXACT)
