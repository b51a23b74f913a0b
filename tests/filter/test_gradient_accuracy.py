"""Gradients in float32 where keys are small or writes noiseless: against float64, and against differences in mpmath."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import membydesign as mbd

WAYS: list[dict[str, Any]] = [{"method": "recurrent"}, {"backend": "torch"}, {"backend": "native"}]
RESETS = {"reset": mbd.Reset(), "per_column": mbd.PerColumnReset()}
SCALES_AND_NOISES = [(scale, 1.0) for scale in (1e3, 1.0, 1e-3, 1e-4, 1e-10, 1e-19, 1e-20, 0.0)]
SCALES_AND_NOISES += [(1.0, 1e-3), (1e-2, 1e-3), (1e-4, 1e-6)]
B, T, H, D, M = 2, 5, 2, 4, 3


def leaves_of(covariance: str, key_scale: float, write_noise: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, B, T, H, D, generator=generator)
    v = torch.randn(B, T, H, M, generator=generator)
    size = (B, T, H, M) if covariance == "per_column" else (B, T, H)
    prior_variance = 1 + 0.1 * torch.rand(size, generator=generator)
    return {
        "q": q,
        "k": key_scale * k,
        "v": v,
        "prior_variance": prior_variance,
        "write_noise": torch.full((B, T, H), write_noise),
    }


def read_variance(covariance: mbd.Covariance, leaves: dict[str, Tensor], **way: Any) -> Tensor:
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), covariance)
    variance = mbd.filter_sequence(design, **leaves, return_variance=True, **way).variance
    assert variance is not None
    return variance


def gradients(covariance: mbd.Covariance, leaves: dict[str, Tensor], **way: Any) -> dict[str, Tensor]:
    own = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    weights = torch.randn(B, T, H, 1, generator=torch.Generator().manual_seed(1))
    variance = read_variance(covariance, own, **way)
    (variance * weights.to(variance.dtype)).sum().backward()
    return {name: x.grad for name, x in own.items() if x.grad is not None and name != "v"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way.values())))
@pytest.mark.parametrize("covariance", RESETS)
@pytest.mark.parametrize(("scale", "write_noise"), SCALES_AND_NOISES)
def test_read_variance_of_a_reset(covariance, scale, write_noise, way):
    """Every gradient in float32 is that of float64, however small the keys, and zero keys included."""
    leaves = leaves_of(covariance, scale, write_noise)
    exact = {name: x.double() for name, x in leaves.items()}
    ours, reference = gradients(RESETS[covariance], leaves, **way), expected_gradients(covariance, exact)
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        difference = (ours[name].double() - expected).norm()
        assert difference <= 2e-6 * expected.norm(), (name, difference / expected.norm())


def expected_gradients(covariance: str, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float64, by hand: of λ‖q‖² − λ²β (qᵀk)² with β = 1/(r² + λ‖k‖²)."""
    weights = torch.randn(B, T, H, 1, generator=torch.Generator().manual_seed(1)).double()
    q, k, r2 = x["q"], x["k"], x["write_noise"][..., None]
    prior = x["prior_variance"] if covariance == "per_column" else x["prior_variance"][..., None]
    along, b = (q * k).sum(-1, keepdim=True), 1 / (r2 + prior * k.square().sum(-1, keepdim=True))
    a = prior * b * along  # the gain along q
    of_prior = weights * (q.square().sum(-1, keepdim=True) - 2 * a * along + a**2 * k.square().sum(-1, keepdim=True))
    each = {
        "q": (
            (weights * 2 * prior)[..., None] * q[..., None, :] - (weights * 2 * prior * a)[..., None] * k[..., None, :]
        ),
        "k": (weights * 2 * prior * a**2)[..., None] * k[..., None, :]
        - (weights * 2 * prior * a)[..., None] * q[..., None, :],
    }
    return {
        **{name: g.sum(-2) for name, g in each.items()},
        "prior_variance": of_prior if covariance == "per_column" else of_prior.sum(-1),
        "write_noise": (weights * a**2).sum(-1),
    }


@pytest.mark.parametrize("covariance", RESETS)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-20])
def test_expected_gradients_are_those_of_differences(covariance, scale):
    """The reference above, against central differences in 120 digits."""
    mpmath = pytest.importorskip("mpmath")
    leaves = {name: x.double() for name, x in leaves_of(covariance, scale, 1.0).items()}
    reference = expected_gradients(covariance, leaves)
    weight = float(torch.randn(B, T, H, 1, generator=torch.Generator().manual_seed(1))[1, 2, 1, 0])
    with mpmath.workdps(120):

        def total(q: Any, k: Any, prior: Any, *, r2: Any) -> Any:
            qk, qq, kk = (mpmath.fsum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((q, k), (q, q), (k, k)))
            return weight * mpmath.fsum(l * qq - l * l * qk * qk / (r2 + l * kk) for l in prior)

        def numbers(name: str) -> list[Any]:
            return [mpmath.mpf(float(value)) for value in leaves[name][1, 2, 1].reshape(-1)]

        q, k, prior, (r2,) = (numbers(name) for name in ("q", "k", "prior_variance", "write_noise"))
        step = mpmath.mpf(10) ** -30
        for name, place in (("q", 0), ("k", 1), ("prior_variance", 2)):
            for i in range(len((q, k, prior)[place])):
                moved = [[list(x) for x in (q, k, prior)] for _ in range(2)]
                moved[0][place][i] += step
                moved[1][place][i] -= step
                up, down = (total(*values, r2=r2) for values in moved)
                slope = (up - down) / (2 * step)
                expected = float(reference[name][1, 2, 1].reshape(-1)[i])
                assert abs(float(slope) - expected) <= 1e-12 * abs(expected), name
        slope = (total(q, k, prior, r2=r2 + step) - total(q, k, prior, r2=r2 - step)) / (2 * step)
        assert abs(float(slope) - float(reference["write_noise"][1, 2, 1])) <= 1e-12 * abs(float(slope))


@pytest.mark.parametrize("covariance", RESETS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_second_derivatives_of_a_reset(covariance, scale):
    leaves = {name: x[:1, :2, :1].double().requires_grad_() for name, x in leaves_of(covariance, scale, 1.0).items()}

    def variance(*values: Tensor) -> Tensor:
        return read_variance(RESETS[covariance], dict(zip(leaves, values, strict=True)), method="recurrent")

    assert torch.autograd.gradgradcheck(variance, tuple(leaves.values()))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way.values())))
@pytest.mark.parametrize("write_noise", [1e-12, 1e-8, 1e-4, 1.0])
def test_noise_of_almost_noiseless_latent_inputs(write_noise, way):
    """P = A P Aᵀ + ω r² k kᵀ grows by r² alone; none of its gradient may be lost to rounding of λ − λ²/(λ + r²)."""
    design = mbd.DesignModel(mbd.ScalarDecay(), mbd.LatentInput(), mbd.Dense(prior=0.0))
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, 20, H, D, generator=generator)
    decay = -0.1 * torch.rand(B, 20, H, generator=generator)

    def of_noise(dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
        noise = torch.full((B, 20, H), write_noise, dtype=dtype, requires_grad=True)
        inputs = (x.to(dtype) for x in (q, k, v))
        out = mbd.filter_sequence(
            design,
            *inputs,
            log_decay=decay.to(dtype),
            prior_variance=1.5,
            write_noise=noise,
            return_variance=True,
            **options,
        )
        assert out.variance is not None
        out.variance.sum().backward()
        assert noise.grad is not None
        return out.variance.detach().double(), noise.grad.double()

    # by hand: dP_T/dr²_t = ω² φ² (qᵀk)², all terms positive
    faded = (decay.double().cumsum(1)[:, :, None] - decay.double().cumsum(1)[:, None]).exp()  # [B,T,T,H]
    seen = (torch.einsum("bthd,bshd->btsh", q.double(), k.double()) * faded).square()
    trust = 1.5 / (1.5 + write_noise)
    expected = trust**2 * (seen * torch.ones(20, 20).tril()[None, :, :, None]).sum(1)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        variance, gradient = of_noise(dtype, **way)
        assert (gradient - expected).norm() <= tolerance * expected.norm()
        written = trust * write_noise * torch.einsum("btsh->bth", seen * torch.ones(20, 20).tril()[None, :, :, None])
        assert (variance[..., 0] - written).norm() <= tolerance * written.norm()
