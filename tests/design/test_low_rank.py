"""Low-rank covariances: the contract, exactness where it is promised, and doubt that is never too small."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import pytest
import torch

import membydesign as mbd
from membydesign import DesignModel, ObserveMemory, catalogue
from membydesign.filter import kernels
from membydesign.testing import DesignContract, assert_close, random_problem
from membydesign.testing.problems import Problem

NATIVE = "native, low-rank covariance"


class TestLowRank(DesignContract):
    design = DesignModel(mbd.DiagonalDecay(), ObserveMemory(), mbd.LowRank(2))


class TestNativeTurning(DesignContract):
    design = DesignModel(mbd.DampedRotation(), ObserveMemory(groups=2), mbd.LowRank(3, prior=0.7))
    method, backend = "chunk", "native"


class TestNativeWithRoom(DesignContract):
    """More rows than directions."""

    design = DesignModel(mbd.ScalarDecay(), ObserveMemory(), mbd.LowRank(9))
    method, backend = "chunk", "native"


def dense(problem, sigma2):
    """Outputs, covariances and read variances of the exact filter with Q = σ²(I − A Aᵀ), for one head: a recursion."""
    D, M = problem.q.shape[-1], torch.zeros(problem.q.shape[-1], problem.v.shape[-1], dtype=torch.float64)
    eye = torch.eye(D, dtype=torch.float64)
    P, outputs, covariances = sigma2 * eye, [], []
    for t in range(problem.q.shape[1]):
        k, v, q = problem.k[0, t, 0], problem.v[0, t, 0], problem.q[0, t, 0]
        A = eye
        if "angle" in problem.parameters:
            radius, angle = problem.parameters["log_decay"][0, t, 0].exp(), problem.parameters["angle"][0, t, 0]
            turns = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).view(-1, 2, 2)
            A = torch.block_diag(*(radius[:, None, None] * turns))
        elif "log_decay" in problem.parameters:
            A = torch.diag(problem.parameters["log_decay"][0, t, 0].exp().expand(D))
        r2 = problem.parameters["write_noise"][0, t, 0].reshape(())
        P, M = A @ P @ A.T + sigma2 * (eye - A @ A.T), A @ M
        u = P @ k
        M = M + torch.outer(u, v - M.T @ k) / (r2 + k @ u)
        P = P - torch.outer(u, u) / (r2 + k @ u)
        outputs.append(M.T @ q)
        covariances.append(P)
    return torch.stack(outputs), torch.stack(covariances)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("transition", [mbd.DiagonalDecay(), mbd.DampedRotation()], ids=["diagonal", "rotation"])
@pytest.mark.parametrize("rank", [6, 9])
def test_with_as_many_rows_as_dimensions_it_is_the_exact_filter(transition, rank, backend):
    design = DesignModel(transition, ObserveMemory(), mbd.LowRank(rank, prior=0.8))
    problem = random_problem(design, B=1, T=60, H=1, D=6, M=3)
    ours = problem.filter(backend=backend, return_variance=True)
    outputs, covariances = dense(problem, 0.8)
    assert_close(ours.output[0, :, 0], outputs, 1e-10)
    variance = torch.einsum("td,tde,te->t", problem.q[0, :, 0], covariances, problem.q[0, :, 0])
    assert_close(ours.variance[0, :, 0, 0], variance, 1e-10)
    assert_close(ours.belief.dense_covariance()[0, 0, 0], covariances[-1], 1e-10)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_it_is_exact_while_no_more_directions_than_rows_are_written(backend):
    """Many more writes than rows, in a subspace of as many dimensions as there are rows, or fewer."""
    for directions in (1, 3):
        design = DesignModel(mbd.ScalarDecay(), ObserveMemory(), mbd.LowRank(3))
        problem = random_problem(design, B=1, T=50, H=1, D=8)
        subspace = torch.randn(8, directions, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        k = problem.k[..., :directions] @ subspace.T
        problem = Problem(design, problem.q, k, problem.v, problem.parameters)
        outputs, covariances = dense(problem, 1.0)
        ours = problem.filter(backend=backend)
        assert_close(ours.output[0, :, 0], outputs, 1e-10)
        assert_close(ours.belief.dense_covariance()[0, 0, 0], covariances[-1], 1e-10)


def every_covariance(problem):
    """P of one head after every token, in the loop."""
    state, every = problem.prior(), []
    for t in range(problem.q.shape[1]):
        state = problem.step(state, t)[1]
        every.append(state.dense_covariance()[0, 0, 0])
    return torch.stack(every)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("transition", [mbd.Identity(), mbd.DiagonalDecay(), mbd.DampedRotation()])
def test_it_is_never_surer_than_the_exact_filter(transition, rank):
    design = DesignModel(transition, ObserveMemory(), mbd.LowRank(rank, prior=1.3))
    for seed in range(3):
        problem = random_problem(design, B=1, T=25, H=1, D=6, M=1, seed=seed)
        excess = every_covariance(problem) - dense(problem, 1.3)[1]
        assert torch.linalg.eigvalsh(excess).min() > -1e-12
        if rank < 6:
            assert torch.linalg.eigvalsh(excess[-1]).max() > 1e-3  # something was dropped


def test_it_keeps_almost_as_much_as_singular_directions_would():
    """What is lost of the trace, compared with keeping the top singular directions at every token."""
    design = DesignModel(mbd.DiagonalDecay(), ObserveMemory(), mbd.LowRank(8))
    problem = random_problem(design, B=1, T=120, H=1, D=32, M=1)
    problem.parameters["log_decay"] *= 0.1
    exact, ours = dense(problem, 1.0)[1], every_covariance(problem)
    P, W = [], torch.zeros(0, 32, dtype=torch.float64)
    for t in range(120):
        k = problem.k[0, t, 0]
        W = W * problem.parameters["log_decay"][0, t, 0].exp()
        u = k - W.T @ (W @ k)
        added = u / (problem.parameters["write_noise"][0, t, 0].reshape(()) + k @ u).sqrt()
        _, S, V = torch.linalg.svd(torch.cat([W, added[None]]), full_matrices=False)
        W = (S[:, None] * V)[:8]
        P.append(torch.eye(32, dtype=torch.float64) - W.T @ W)

    def lost(covariances):
        return (covariances - exact)[40:].diagonal(dim1=-2, dim2=-1).sum().item()

    assert lost(torch.stack(P)) <= lost(ours) * 1.02  # nearly the best
    assert lost(ours) <= 1.1 * lost(torch.stack(P))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_stay_finite_where_singular_values_meet(dtype):
    """Orthogonal keys with equal noise: all rows are equally long, and one of them must go."""
    keys = torch.eye(8, dtype=dtype)[None, :, None].expand(1, 8, 1, 8).clone().requires_grad_()
    v = torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    gradients = []
    for backend in ("torch", "native"):
        design = DesignModel(mbd.Identity(), ObserveMemory(), mbd.LowRank(3))
        out = mbd.filter_sequence(design, keys, keys, v, write_noise=0.1, backend=backend, return_variance=True)
        gradients.append(torch.autograd.grad(out.output.square().sum() + out.variance.sum(), keys)[0])
    assert gradients[0].abs().max() < 100
    assert_close(gradients[1], gradients[0], 1e-4 if dtype == torch.float32 else 1e-10)


def test_a_memory_left_alone_returns_to_its_prior():
    design = DesignModel(mbd.ScalarDecay(), ObserveMemory(), mbd.LowRank(4, prior=2.0))
    problem = random_problem(design, B=1, T=200, H=1, D=6)
    problem.k[:, 5:] = 0.0
    problem.parameters["log_decay"] -= 0.1
    out = problem.filter(return_variance=True)
    assert_close(out.variance[0, -1, 0, 0], 2.0 * problem.q[0, -1, 0].square().sum(), 1e-10)


def test_rows_that_resolve_more_than_there_is_are_refused():
    problem = random_problem(DesignModel(mbd.Identity(), ObserveMemory(), mbd.LowRank(2)), B=1, H=1)
    prior = problem.prior()
    rows = torch.zeros_like(prior.covariance.rows)
    rows[0, 0, 0, :, 0] = 0.9
    lost = mbd.LowRankBelief(prior.mean, prior.covariance._replace(rows=rows))
    with pytest.raises(mbd.NotPositiveDefiniteError, match="covariance"):
        problem.filter(initial=lost)
    for wrong in ({"rank": 0}, {"prior": 0.0}, {"prior": -1.0}):
        with pytest.raises(ValueError, match=rf"LowRank\({next(iter(wrong))}\): expected"):
            mbd.LowRank(**wrong)


def test_the_catalogue_s_row_runs_natively_and_as_a_layer():
    design = catalogue["low_rank"]
    assert kernels.why_not_each(design)[NATIVE] is None
    assert design.exactness == "rank-16 truncation, never overconfident"
    assert design.state_size(D=256, M=8).covariance == 16 * 256 + 1
    assert [parameter.name for parameter in design.step_parameters] == ["log_decay", "write_noise"]
    layer = mbd.make_layer("low_rank", 16, num_heads=2, head_dim=32)
    y, belief = layer(torch.randn(2, 5, 16))
    assert y.shape == (2, 5, 16)
    assert belief.memory.covariance.rows.shape == (2, 2, 1, 16, 32)
