"""StudentTWrite: the contract, its limits, and a stream with outliers."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from dataclasses import replace

import pytest
import torch

import membydesign as mbd
from membydesign.testing import DesignContract, assert_close, random_problem

ROBUST = mbd.catalogue["robust_writes"]


class TestRobust(DesignContract):
    design = ROBUST
    linear_in_values = False


class TestGroups(DesignContract):
    design = mbd.DesignModel(mbd.ScalarDecay(), mbd.StudentTWrite(degrees=2.5, groups=2), mbd.Dense())
    linear_in_values = False


class TestDiagonal(DesignContract):
    design = mbd.DesignModel(mbd.DampedRotation(), mbd.StudentTWrite(degrees=1.0), mbd.Diagonal())
    linear_in_values = False


def test_many_degrees_are_a_gaussian():
    problem = random_problem(ROBUST.replace(write=mbd.StudentTWrite(degrees=1e9)))
    options = {"return_variance": True, "return_evidence": True}
    ours, gaussian = (
        problem.filter(**options),
        replace(problem, design=mbd.catalogue["bayesian_layer"]).filter(**options),
    )
    assert_close(ours.output, gaussian.output, 1e-7)
    assert_close(ours.variance, gaussian.variance, 1e-7)
    assert_close(ours.write_log_evidence, gaussian.write_log_evidence, 1e-6)


def test_the_density_is_a_multivariate_student_t():
    """Against torch's own distribution in one column, and by integration over τ in three."""
    write, step = mbd.StudentTWrite(degrees=3.0), {"write_noise": torch.tensor([[[0.7]]], dtype=torch.float64)}
    mean, variance, v, s = (torch.full((1, 1, 1), x, dtype=torch.float64) for x in (0.3, 0.5, 2.0, 1.2))
    expected = torch.distributions.StudentT(torch.full_like(s, 3.0), mean, s.sqrt()).log_prob(v)
    assert_close(write.observe(mean, variance, v, step).log_density, expected[..., 0], 1e-12)
    e, s = torch.tensor([0.4, -1.5, 2.0], dtype=torch.float64), 1.2
    tau = torch.linspace(1e-6, 30, 400_001, dtype=torch.float64)
    weights = torch.distributions.Gamma(torch.tensor(1.5).double(), torch.tensor(1.5).double()).log_prob(tau)
    gaussian = 1.5 * (tau / (2 * torch.pi * s)).log() - tau * e.square().sum() / (2 * s)
    integral = torch.trapezoid((weights + gaussian).exp(), tau).log()
    ours = write.observe(torch.zeros(1, 1, 3).double(), variance, e[None, None], step).log_density
    assert abs(ours.item() - integral.item()) < 1e-6


def test_only_surprising_writes_are_trusted_less():
    write, noise = mbd.StudentTWrite(degrees=4.0), torch.tensor([[[0.5]]], dtype=torch.float64)
    mean, variance = torch.zeros(1, 1, 4, dtype=torch.float64), torch.tensor([[[0.5]]], dtype=torch.float64)
    for size, factor in ((0.0, 4 / 5), (1.0, 1.0), (10.0, 104 / 5)):
        v = torch.full((1, 1, 4), size, dtype=torch.float64)
        effective = write.observe(mean, variance, v, {"write_noise": noise}).noise
        assert_close(effective, factor * noise, 1e-12)


def test_robust_writes_survive_outliers():
    """A slowly drifting memory whose writes are wrong by ten standard deviations once in ten."""
    generator = torch.Generator().manual_seed(0)
    B, T, D, M, noise, drift = 8, 400, 4, 4, 0.1, 0.002

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(B, T, 1, D), dim=-1)
    S, truth = normal(B, D, M), []
    for t in range(T):
        S = S + drift**0.5 * normal(B, D, M)
        truth.append(torch.einsum("bd,bdm->bm", k[:, t, 0], S))
    truth = torch.stack(truth, 1)[:, :, None]
    outlier = torch.rand(B, T, 1, 1, generator=generator) < 0.1
    clean = truth + noise**0.5 * normal(B, T, 1, M)
    v = torch.where(outlier, truth + 10 * noise**0.5 * normal(B, T, 1, M), clean)
    step = {"write_noise": noise, "process_noise": drift, "log_decay": 0.0}

    def error(design, values):
        out = mbd.filter_sequence(design, k, k, values, **step).output
        return (out - truth)[:, 50:].square().mean().sqrt().item()

    gaussian, robust = mbd.catalogue["bayesian_layer"], ROBUST
    assert error(robust, v) < 0.5 * error(gaussian, v)
    assert error(robust, clean) < 1.05 * error(gaussian, clean)  # and where there are none it costs little


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"degrees": 0.0}, r"StudentTWrite\(degrees\): expected a finite number above 0, got 0.0"),
        ({"degrees": float("inf")}, r"StudentTWrite\(degrees\): expected a finite number above 0, got inf"),
        ({"degrees": True}, r"StudentTWrite\(degrees\)"),
        ({"groups": 0}, r"StudentTWrite\(groups\): expected a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mbd.StudentTWrite(**options)


def test_layers_by_name():
    layer = mbd.make_layer("robust_writes", 16, num_heads=2, head_dim=8, groups=2)
    assert layer.design.write == mbd.StudentTWrite(groups=2)
    y, _ = layer(torch.randn(2, 9, 16))
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
