"""The closed forms against simulations by the filter, over random parameters and not only at the paper's point."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import membydesign as mbd
from membydesign import theory

variances = st.floats(-3.0, 1.5).map(math.exp)  # 0.05 to 4.5
overlaps = st.floats(0.02, 0.98)
seeds = st.integers(0, 2**20)
DENSE = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
D, M = 5, 3
few = settings(max_examples=25)


def unit(generator: torch.Generator, size: int = D) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(size, generator=generator, dtype=torch.float64), dim=0)


def random_covariance(generator: torch.Generator) -> Tensor:
    root = torch.randn(D, D, generator=generator, dtype=torch.float64)
    return root @ root.T / D + 0.05 * torch.eye(D, dtype=torch.float64)


def pair(generator: torch.Generator, overlap: float) -> tuple[Tensor, Tensor]:
    """Two unit keys in random directions, with the given overlap."""
    k_A, other = unit(generator), unit(generator)
    perp = torch.nn.functional.normalize(other - (other @ k_A) * k_A, dim=0)
    return k_A, overlap * k_A + math.sqrt(1 - overlap**2) * perp


def write_repeatedly(
    k: Tensor, times: int, l2: float, r2: float, belief: mbd.Belief, v: Tensor | None = None, q: Tensor | None = None
) -> mbd.Filtered:
    """Write the same (k, v) many times, from a belief; read at q."""
    v = torch.zeros(M, dtype=torch.float64) if v is None else v
    q = k if q is None else q
    keys, queries, values = (x.expand(1, times, 1, -1) for x in (k, q, v))
    return mbd.filter_sequence(
        DENSE, queries, keys, values, process_noise=l2, write_noise=r2, initial=belief, return_variance=True
    )


def belief_from(P: Tensor, mean: Tensor | None = None) -> mbd.Belief:
    mean = torch.zeros(D, M, dtype=torch.float64) if mean is None else mean
    return mbd.Belief(mean[None, None], P[None, None, None])


def covariance_after(out: mbd.Filtered) -> Tensor:
    assert out.belief.covariance is not None
    return out.belief.covariance[0, 0, 0]


def variances_of(out: mbd.Filtered) -> Tensor:
    assert out.variance is not None
    return out.variance[0, :, 0, 0]


@few
@given(seed=seeds, l2=variances, r2=variances)
def test_gain_is_the_share_of_the_error_that_a_write_corrects(seed, l2, r2):
    generator = torch.Generator().manual_seed(seed)
    P, k, v = random_covariance(generator), unit(generator), torch.ones(M, dtype=torch.float64)
    out = write_repeatedly(k, 1, l2, r2, belief_from(P), v)
    predicted_variance = (k @ P @ k).item() + l2
    expected = theory.gain(predicted_variance, r2)
    assert out.output[0, 0, 0].tolist() == pytest.approx([expected] * M, rel=1e-10)
    assert variances_of(out).item() == pytest.approx(r2 * expected, rel=1e-9)  # σ²(k_t) = r² g_t


@few
@given(seed=seeds, l2=variances, r2=variances)
def test_same_key_fixed_point_and_steady_gain(seed, l2, r2):
    generator = torch.Generator().manual_seed(seed)
    k = unit(generator)
    posterior = variances_of(write_repeatedly(k, 400, l2, r2, belief_from(random_covariance(generator))))[-1].item()
    assert posterior == pytest.approx(theory.same_key_posterior_variance(l2, r2), rel=1e-9)
    predicted = theory.same_key_predicted_variance(l2, r2)
    assert posterior + l2 == pytest.approx(predicted, rel=1e-9)
    assert predicted**2 - l2 * predicted - r2 * l2 == pytest.approx(0, abs=1e-12 * max(1, predicted**2))
    assert posterior / r2 == pytest.approx(theory.steady_gain(l2, r2), rel=1e-9)


@given(r2=variances, ratio=st.floats(1e-8, 1e-4))
def test_steady_gain_of_slow_drift(r2, ratio):
    """g → √(ℓ²/r²), with a relative error that vanishes as √(ℓ²/r²)."""
    l2 = ratio * r2
    limit = theory.steady_gain_slow_drift(l2, r2)
    assert abs(theory.steady_gain(l2, r2) / limit - 1) < math.sqrt(ratio)


@given(r2=variances, ratio=st.floats(1e2, 1e6))
def test_steady_gain_of_fast_drift(r2, ratio):
    """1 − g → r²/ℓ², with a relative error that vanishes as r²/ℓ²; half of it, as the paper prints, is refuted."""
    l2 = ratio * r2
    shortfall = 1 - theory.steady_gain(l2, r2)
    assert shortfall == pytest.approx(1 - theory.steady_gain_fast_drift(l2, r2), rel=3 / ratio + 1e-9)
    assert shortfall > 1.9 * (r2 / (2 * l2))


def test_the_slip_in_the_paper_shows_in_simulation():
    """ℓ² = 100 r²: the filter's gain is 1 − r²/ℓ² to 2e-4, and not 1 − r²/(2ℓ²)."""
    generator = torch.Generator().manual_seed(0)
    out = write_repeatedly(unit(generator), 50, 100.0, 1.0, belief_from(random_covariance(generator)))
    simulated = variances_of(out)[-1].item()  # r² = 1, so this is the gain
    assert simulated == pytest.approx(theory.steady_gain_fast_drift(100.0, 1.0), abs=2e-4)
    assert abs(simulated - (1 - 1 / 200)) > 4e-3


@few
@given(seed=seeds, l2=variances, r2=variances)
def test_cross_key_balance(seed, l2, r2):
    """Proposition 3: both equalities and the chain of bounds, at a random covariance and random keys."""
    generator = torch.Generator().manual_seed(seed)
    before, k_A, k_B = random_covariance(generator), unit(generator), unit(generator)
    after = covariance_after(write_repeatedly(k_A, 1, l2, r2, belief_from(before)))
    simulated = (k_B @ (after - before) @ k_B).item()
    predicted = before + l2 * torch.eye(D, dtype=torch.float64)
    balance = theory.cross_key_balance(predicted, k_A, k_B, l2, r2)
    assert simulated == pytest.approx(balance.change, abs=1e-10)
    correlation = theory.covariance_weighted_correlation(predicted, k_A, k_B)
    assert abs(correlation) <= 1 + 1e-12
    assert simulated == pytest.approx(l2 - balance.bound * correlation**2, abs=1e-10)
    assert 0 <= balance.contraction <= balance.bound * (1 + 1e-12) <= balance.predicted_variance * (1 + 1e-12)


def test_correlation_with_a_certain_direction_is_zero():
    P = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    e1, e2 = torch.eye(2, dtype=torch.float64)
    assert theory.covariance_weighted_correlation(P, e1, e2) == 0.0


@few
@given(seed=seeds, overlap=overlaps, l2=variances, r2=variances)
def test_crowding_rate(seed, overlap, l2, r2):
    """Uncertainty along k_B grows by (1 − ρ²)ℓ² per write of k_A, from any starting covariance."""
    generator = torch.Generator().manual_seed(seed)
    k_A, k_B = pair(generator, overlap)
    out = write_repeatedly(k_A, 500, l2, r2, belief_from(random_covariance(generator)), q=k_B)
    slope = (variances_of(out)[-1] - variances_of(out)[-2]).item()
    assert slope == pytest.approx(theory.crowding_rate(overlap, l2), abs=1e-9)


@few
@given(seed=seeds, overlap=overlaps, l2=variances, r2=variances, writes=st.integers(300, 600))
def test_boundary_gain_and_warped_key_angle(seed, overlap, l2, r2, writes):
    """After a long run of B, the first write of A: its gain and its direction."""
    generator = torch.Generator().manual_seed(seed)
    k_B, k_A = pair(generator, overlap)
    perp = (k_A - overlap * k_B) / math.sqrt(1 - overlap**2)
    P = covariance_after(write_repeatedly(k_B, writes, l2, r2, belief_from(random_covariance(generator))))
    predicted = P + l2 * torch.eye(D, dtype=torch.float64)
    variance_B, variance_perp = (k_B @ predicted @ k_B).item(), (perp @ predicted @ perp).item()
    assert variance_B == pytest.approx(theory.same_key_predicted_variance(l2, r2), rel=1e-8)

    first = write_repeatedly(k_A, 1, l2, r2, belief_from(P))
    simulated_gain = variances_of(first).item() / r2
    assert simulated_gain == pytest.approx(theory.boundary_gain(overlap, r2, variance_B, variance_perp), abs=1e-8)

    # Directions other than k_B and e_⊥ were uncertain too, but P̄ is diagonal there only in the plane of A and B:
    # the closed form speaks of the warped key within that plane.
    u = predicted @ k_A
    along = (k_A @ u).item()
    in_plane = torch.stack([k_B @ u, perp @ u])
    angle = math.acos(min(1.0, along / in_plane.norm().item()))
    assert angle == pytest.approx(theory.warped_key_angle(overlap, variance_B, variance_perp), abs=1e-6)


@given(overlap=overlaps, r2=variances, variance_B=variances)
def test_boundary_limits(overlap, r2, variance_B):
    assert theory.boundary_gain(overlap, r2, variance_B, 1e15) == pytest.approx(theory.BOUNDARY_GAIN_CEILING, abs=1e-9)
    assert theory.warped_key_angle(overlap, variance_B, 1e15) == pytest.approx(
        theory.warped_key_angle_limit(overlap), abs=1e-6
    )
    assert theory.warped_key_angle_limit(overlap) == pytest.approx(math.asin(overlap))
    assert theory.warped_key_angle(overlap, variance_B, variance_B) == 0.0  # isotropic: no rotation


@given(overlap=overlaps, variance_B=variances, variance_perp=variances)
def test_warped_key_angle_is_the_papers_cosine(overlap, variance_B, variance_perp):
    numerator = overlap**2 * variance_B + (1 - overlap**2) * variance_perp
    denominator = math.sqrt(overlap**2 * variance_B**2 + (1 - overlap**2) * variance_perp**2)
    angle = theory.warped_key_angle(overlap, variance_B, variance_perp)
    assert math.cos(angle) == pytest.approx(numerator / denominator, abs=1e-12)


@few
@given(seed=seeds, l2=variances, r2=variances)
def test_target_write_plateau(seed, l2, r2):
    generator = torch.Generator().manual_seed(seed)
    v_B = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    mean = torch.randn(D, M, generator=generator, dtype=torch.float64)
    out = write_repeatedly(unit(generator), 400, l2, r2, belief_from(random_covariance(generator), mean), v_B)
    a, b, _ = out.output[0, -1, 0].tolist()
    assert theory.pairwise_retrieval(b, a) == pytest.approx(theory.TARGET_WRITE_PLATEAU, abs=1e-9)
    assert pytest.approx(0.731, abs=5e-4) == theory.TARGET_WRITE_PLATEAU


@few
@given(seed=seeds, l2=variances, r2=variances, writes=st.integers(1, 40))
def test_same_key_contraction(seed, l2, r2, writes):
    """Every coordinate of the error at the key shrinks by the same product of gains."""
    generator = torch.Generator().manual_seed(seed)
    k, P = unit(generator), random_covariance(generator)
    mean = torch.randn(D, M, generator=generator, dtype=torch.float64)
    v = torch.randn(M, generator=generator, dtype=torch.float64)
    out = write_repeatedly(k, writes, l2, r2, belief_from(P, mean), v)
    left = theory.same_key_contraction((k @ P @ k).item() + l2, l2, r2, writes)
    torch.testing.assert_close(out.output[0, -1, 0] - v, left * (mean.T @ k - v), rtol=1e-9, atol=1e-12)


@few
@given(seed=seeds, overlap=overlaps, l2=variances, r2=variances)
def test_variance_parts(seed, overlap, l2, r2):
    """Writes of A resolve the first part and remove the second; the third grows by what process noise adds to it."""
    generator = torch.Generator().manual_seed(seed)
    k_A, k_B = pair(generator, overlap)
    before = random_covariance(generator)
    out = write_repeatedly(k_A, 500, l2, r2, belief_from(before), q=k_B)
    start, end = theory.variance_parts(before, k_A, k_B), theory.variance_parts(covariance_after(out), k_A, k_B)
    assert sum(start) == pytest.approx((k_B @ before @ k_B).item())
    assert sum(end) == pytest.approx(variances_of(out)[-1].item())
    assert end.along == pytest.approx(overlap**2 * theory.same_key_posterior_variance(l2, r2), rel=1e-6)
    assert end.cross == pytest.approx(0, abs=1e-9)
    one_more = write_repeatedly(k_A, 1, l2, r2, out.belief, q=k_B)
    later = theory.variance_parts(covariance_after(one_more), k_A, k_B)
    assert later.perpendicular - end.perpendicular == pytest.approx(theory.crowding_rate(overlap, l2), abs=1e-9)


@few
@given(seed=seeds, overlap=overlaps, strength=variances, writes=st.integers(1, 60))
def test_linear_attention_forgets_without_a_limit(seed, overlap, strength, writes):
    generator = torch.Generator().manual_seed(seed)
    k_A, k_B = pair(generator, overlap)
    mean = torch.randn(D, M, generator=generator, dtype=torch.float64)
    v_A = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    keys, queries, values = (x.expand(1, writes, 1, -1) for x in (k_A, k_B, strength * v_A))
    noiseless = {"prior_variance": 1.0, "write_noise": 0.0, "initial": mbd.Belief(mean[None, None])}
    out = mbd.filter_sequence(mbd.catalogue["linear_attention"], queries, keys, values, **noiseless)
    b0 = mean.T @ k_B
    torch.testing.assert_close(out.output[0, -1, 0], theory.additive_readout(b0, v_A, overlap, strength, writes))
    a, b, _ = theory.additive_readout(b0, v_A, overlap, strength, 10**6).tolist()
    assert theory.pairwise_retrieval(b, a) < 1e-9


@given(target=st.floats(-5, 5), distractor=st.floats(-5, 5))
def test_margin_is_twice_the_retrieval_less_one(target, distractor):
    p = theory.pairwise_retrieval(target, distractor)
    assert theory.retrieval_margin(target, distractor) == pytest.approx(2 * p - 1, abs=1e-12)


@few
@given(seed=seeds, overlap=overlaps, gate=st.floats(0.1, 0.9))
def test_delta_plateau(seed, overlap, gate):
    """From any boundary state, whatever the constant gain."""
    generator = torch.Generator().manual_seed(seed)
    k_A, k_B = pair(generator, overlap)
    mean = torch.randn(D, M, generator=generator, dtype=torch.float64)
    v_A = torch.randn(M, generator=generator, dtype=torch.float64)
    keys, queries, values = (x.expand(1, 400, 1, -1) for x in (k_A, k_B, v_A))
    noise = theory.write_noise_of_gate(torch.tensor(gate, dtype=torch.float64), k_A)
    assert theory.reset_gain(1.0, noise.item()) == pytest.approx(gate)
    out = mbd.filter_sequence(
        mbd.catalogue["deltanet"],
        queries,
        keys,
        values,
        prior_variance=1.0,
        write_noise=noise,
        initial=mbd.Belief(mean[None, None]),
    )
    expected = theory.delta_plateau(mean.T @ k_A, mean.T @ k_B, v_A, overlap)
    torch.testing.assert_close(out.output[0, -1, 0], expected, rtol=1e-9, atol=1e-9)


@few
@given(seed=seeds, overlap=overlaps, l2=variances, r2=variances)
def test_bayesian_plateau(seed, overlap, l2, r2):
    """The series over scalars equals the filter over matrices, from any boundary state."""
    generator = torch.Generator().manual_seed(seed)
    k_A, k_B = pair(generator, overlap)
    P, mean = random_covariance(generator), torch.randn(D, M, generator=generator, dtype=torch.float64)
    v_A = torch.randn(M, generator=generator, dtype=torch.float64)
    out = write_repeatedly(k_A, 600, l2, r2, belief_from(P, mean), v_A, q=k_B)
    expected = theory.bayesian_plateau(P, mean.T @ k_A, mean.T @ k_B, v_A, k_A, k_B, process_noise=l2, write_noise=r2)
    torch.testing.assert_close(out.output[0, -1, 0], expected, rtol=1e-9, atol=1e-9)


def test_bayesian_plateau_needs_process_noise():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="process_noise: expected a finite variance > 0, got 0"):
        theory.bayesian_plateau(one[:, None], one, one, one, one, one, process_noise=0.0, write_noise=1.0)


@few
@given(lam=variances, r2=variances, seed=seeds)
def test_trust(lam, r2, seed):
    v = torch.randn(1, 1, 1, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out = mbd.filter_sequence(mbd.catalogue["linear_attention"], one, one, v, prior_variance=lam, write_noise=r2)
    torch.testing.assert_close(out.output, theory.trust(lam, r2) * v)


@few
@given(seed=seeds, n=st.integers(1, 2 * D))
def test_capacity(seed, n):
    """Exact recall of arbitrary values exists up to D keys and not beyond: least squares leaves a residual."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, D, generator=generator, dtype=torch.float64)
    values = torch.randn(n, M, generator=generator, dtype=torch.float64)
    assume(n > D or torch.linalg.cond(keys) < 1e6)
    best = torch.linalg.lstsq(keys, values, driver="gelsd").solution
    residual = (keys @ best - values).abs().max().item()
    assert theory.is_exactly_recallable(keys) == (n <= theory.capacity(D))
    assert (residual < 1e-8) == (n <= theory.capacity(D))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.steady_gain(process_noise=-1.0, write_noise=0.1), "process_noise: expected a finite variance"),
        (lambda: theory.same_key_contraction(1.0, 0.1, 0.0, 3), "write_noise: expected a variance > 0, got 0"),
        (lambda: theory.crowding_rate(overlap=2.0, process_noise=0.1), "overlap: expected a cosine"),
        (lambda: theory.boundary_gain(0.5, 0.1, float("nan"), 1.0), "variance_B: expected a finite variance"),
        (lambda: theory.warped_key_angle(-2.0, 1.0, 1.0), "overlap: expected a cosine"),
        (
            lambda: theory.write_noise_of_gate(torch.tensor(1.0), torch.ones(1)),
            r"gate: expected values > 0 with gate·‖k‖² < 1, got gate·‖k‖² up to 1",
        ),
    ],
)
def test_theory_refuses_what_has_no_meaning(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_theory_at_its_edges():
    assert theory.same_key_posterior_variance(0.0, 1.0) == 0.0
    assert theory.pairwise_retrieval(-800.0, 0.0) == 0.0
    assert theory.pairwise_retrieval(800.0, 0.0) == 1.0
