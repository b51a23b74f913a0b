"""Block-diagonal covariances: the contract, the recursion written out, and the two ends, `Diagonal` and `Dense`."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import pytest
import torch

import membydesign as mbd
from membydesign import DesignModel, ObserveMemory, catalogue
from membydesign.filter import kernels
from membydesign.testing import DesignContract, assert_close, random_problem

NATIVE = "native, block-diagonal covariance"


class TestBlock(DesignContract):
    design = DesignModel(mbd.DiagonalDecay(), ObserveMemory(), mbd.Block(2))


class TestNativeTurning(DesignContract):
    design = DesignModel(mbd.DampedRotation(noise="real"), ObserveMemory(groups=2), mbd.Block(2, prior=0.7))
    method, backend = "chunk", "native"


class TestNativeStationary(DesignContract):
    design = DesignModel(mbd.Stationary(mbd.DampedRotation()), ObserveMemory(), mbd.Block(16, prior=0.7))
    method, backend = "chunk", "native"


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_it_is_the_filter_with_a_mask(size, backend):
    """The whole recursion with matrices: after each write, entries between blocks become zero."""
    design = DesignModel(mbd.DiagonalDecay(), ObserveMemory(), mbd.Block(size, prior=0.8))
    problem = random_problem(design, B=1, T=40, H=1, D=6, M=3)
    ours = problem.filter(backend=backend, return_variance=True)
    block = torch.arange(6) // size
    mask = (block[:, None] == block).double()
    P, M = 0.8 * torch.eye(6, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.float64)
    for t in range(40):
        k, v, q = problem.k[0, t, 0], problem.v[0, t, 0], problem.q[0, t, 0]
        a = problem.parameters["log_decay"][0, t, 0].exp()
        l2, r2 = (problem.parameters[name][0, t, 0].reshape(()) for name in ("process_noise", "write_noise"))
        P = torch.diag(a) @ P @ torch.diag(a) + l2 * torch.eye(6, dtype=torch.float64)
        u = P @ k
        M = a[:, None] * M
        M = M + torch.outer(u, v - M.T @ k) / (r2 + k @ u)
        P = mask * (P - torch.outer(u, u) / (r2 + k @ u))
        assert_close(ours.output[0, t, 0], M.T @ q, 1e-11)
        assert_close(ours.variance[0, t, 0, 0], q @ P @ q, 1e-11)
    assert_close(ours.belief.dense_covariance()[0, 0, 0], P, 1e-11)


@pytest.mark.parametrize(("size", "other"), [(1, mbd.Diagonal()), (6, mbd.Dense()), (100, mbd.Dense())])
def test_its_two_ends_are_diagonal_and_dense(size, other):
    design = DesignModel(mbd.ScalarDecay(), ObserveMemory(groups=2), mbd.Block(size))
    problem = random_problem(design, T=30, D=6)
    ours = problem.filter(return_variance=True, return_evidence=True)
    expected = random_problem(design.replace(covariance=other), T=30, D=6).filter(
        return_variance=True, return_evidence=True
    )
    for name in ("output", "variance", "write_log_evidence"):
        assert_close(getattr(ours, name), getattr(expected, name), 1e-11, name)


def test_blocks_may_cut_pairs_that_turn():
    """Then the predicted covariance connects blocks: gains come from whole matrices, and the mean from any kernel."""
    design = DesignModel(mbd.DampedRotation(), ObserveMemory(), mbd.Block(3))
    assert "a block has an odd number" in str(kernels.why_not_each(design, D=6)[NATIVE])
    problem = random_problem(design, D=6, T=20)
    expected = problem.filter(method="recurrent").output
    for backend in ("torch", "native"):
        assert_close(problem.filter(backend=backend).output, expected, 1e-11)


def test_a_size_that_does_not_divide_the_key_is_refused_by_name():
    with pytest.raises(ValueError, match="D divisible by the block size 4"):
        random_problem(DesignModel(mbd.Identity(), ObserveMemory(), mbd.Block(4)), D=6).filter()
    for size in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"Block\(size\): expected a whole number of at least 1"):
            mbd.Block(size)


def test_a_lost_block_is_found():
    problem = random_problem(DesignModel(mbd.Identity(), ObserveMemory(), mbd.Block(2)), B=1, H=1)
    prior = problem.prior()
    lost = prior.covariance.clone()
    lost[0, 0, 0, 1] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(mbd.NotPositiveDefiniteError, match="negative eigenvalue at batch 0, head 0, group 0"):
        problem.filter(initial=mbd.BlockBelief(prior.mean, lost))


def test_the_catalogue_s_row_runs_natively_and_as_a_layer():
    design = catalogue["block_diagonal"]
    assert kernels.why_not_each(design)[NATIVE] is None
    assert design.state_size(D=256, M=8).covariance == 16 * 256
    layer = mbd.make_layer("block_diagonal", 16, num_heads=2, head_dim=32)
    y, belief = layer(torch.randn(2, 5, 16))
    assert y.shape == (2, 5, 16)
    assert belief.memory.covariance.shape == (2, 2, 1, 2, 16, 16)
