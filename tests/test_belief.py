import math

import pytest
import torch
from torch.distributions import Normal

import membydesign as mbd
from membydesign import Belief
from problems import random_belief

DENSE = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(groups=2), mbd.Dense(prior=2.5))
DIAGONAL = DENSE.replace(covariance=mbd.Diagonal(prior=2.5))


def test_prior():
    dense, diagonal = (Belief.prior(design, 2, 3, 4, 6) for design in (DENSE, DIAGONAL))
    assert dense.covariance is not None
    assert dense.covariance.shape == (2, 3, 2, 4, 4)
    assert torch.equal(dense.covariance[1, 2, 1], 2.5 * torch.eye(4))
    assert torch.equal(diagonal.dense_covariance(), dense.covariance)
    assert Belief.prior(mbd.catalogue["kda"], 2, 3, 4, 6).covariance is None


@pytest.mark.parametrize("design", [DENSE, DIAGONAL])
def test_read_and_variance_by_hand(design):
    belief = random_belief(design, M=6)
    q = torch.randn(2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for b in range(2):
        for h in range(2):
            torch.testing.assert_close(belief.read(q)[b, h], belief.mean[b, h].T @ q[b, h])
            for g in range(2):
                P = belief.dense_covariance()[b, h, g]
                torch.testing.assert_close(belief.variance(q)[b, h, g], q[b, h] @ P @ q[b, h])


def test_log_evidence_is_a_density():
    belief = random_belief(DENSE, M=6)
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 4, dtype=torch.float64, generator=generator)
    v = torch.randn(2, 2, 6, dtype=torch.float64, generator=generator)
    noise = torch.tensor([0.3, 0.7], dtype=torch.float64).expand(2, 2, 2)
    scale = (noise + belief.variance(k)).sqrt().repeat_interleave(3, -1)
    expected = Normal(belief.read(k), scale).log_prob(v).sum(-1)
    torch.testing.assert_close(belief.log_evidence(k, v, noise), expected)


def test_a_belief_without_covariance_has_no_variance():
    belief = random_belief(mbd.catalogue["deltanet"])
    with pytest.raises(ValueError, match="got covariance=None"):
        belief.variance(torch.zeros(2, 2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="got covariance=None"):
        belief.dense_covariance()


def test_detach_and_map():
    belief = random_belief(DENSE).map(lambda x: x.requires_grad_())
    assert not any(x.requires_grad for x in belief.detach() if x is not None)
    assert math.isclose(belief.map(lambda x: 2 * x).mean.sum().item(), 2 * belief.mean.sum().item())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.read(torch.zeros(2, 2, 1)), r"q: expected shape \[2, 2, 4\] to go with the belief"),
        (lambda b: b.variance(torch.zeros(2, 7, 2, 4)), r"q: expected shape \[2, 2, 4\]"),
        (lambda b: b.log_evidence(b.mean[..., 0], torch.zeros(2, 2, 1), 0.1), r"v: expected shape \[2, 2, 4\]"),
        (
            lambda b: b.log_evidence(b.mean[..., 0], b.mean[..., 0], torch.ones(2, 2)),
            r"write_noise: expected shape \[2, 2, 2\]",
        ),
        (lambda b: Belief.prior(DENSE, 1, 1, 4, 4, dtype=torch.bfloat16), "dtype: expected float32 or float64"),
    ],
)
def test_readouts_check_their_shapes(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_belief(DENSE))


def test_beliefs_are_saved_and_loaded_safely(tmp_path):
    belief = random_belief(DENSE)
    torch.save(belief, tmp_path / "belief.pt")
    loaded = torch.load(tmp_path / "belief.pt", weights_only=True)
    assert isinstance(loaded, Belief)
    assert torch.equal(loaded.mean, belief.mean)


@pytest.mark.parametrize("design", [DENSE, DIAGONAL, mbd.catalogue["kda"]])
def test_beliefs_move_and_change_their_type(design):
    belief = random_belief(design)
    for moved, dtype in (
        (belief.to("meta"), torch.float64),
        (belief.to(device=torch.device("meta"), dtype=torch.float32), torch.float32),
        (belief.to("meta", torch.float32), torch.float32),
    ):
        assert isinstance(moved, Belief)
        assert all(x.is_meta and x.dtype == dtype for x in moved if x is not None)
        assert (moved.covariance is None) == (belief.covariance is None)
    assert torch.equal(belief.to(dtype=torch.float32).mean, belief.mean.float())
    assert torch.equal(belief.to(torch.float32).mean, belief.mean.float())
    assert torch.equal(belief.to().mean, belief.mean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_beliefs_are_never_lowered_below_float32(dtype):
    with pytest.raises(ValueError, match=f"^dtype: expected float32 or float64 for a belief, got {dtype}"):
        random_belief(DENSE).to(dtype=dtype)
    with pytest.raises(ValueError, match=f"^dtype: expected float32 or float64 for a belief, got {dtype}"):
        random_belief(DENSE).to(dtype)


def test_a_belief_goes_to_a_device():
    with pytest.raises(ValueError, match=r'^device: expected a device such as "cuda", got tensor\(1\.\)'):
        random_belief(DENSE).to(torch.tensor(1.0))  # pyright: ignore[reportArgumentType]
