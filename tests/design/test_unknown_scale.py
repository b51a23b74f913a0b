"""UnknownScale: the contract, the joint Student-t of all writes, coverage of intervals, kernels and layers."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

from dataclasses import dataclass, replace

import pytest
import torch

import membydesign as mbd
from membydesign.belief import log_gamma_ratio
from membydesign.filter import kernels
from membydesign.filter.scaled import scan
from membydesign.testing import DesignContract, Problem, assert_close, assert_states_close, condition, random_problem

BAYESIAN = mbd.catalogue["bayesian_layer"]
PLAIN = mbd.UnknownScale(BAYESIAN, shape=1.7, rate=0.6)
GROUPED = mbd.UnknownScale(
    mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(groups=2), mbd.Dense(prior=1.5)), shape=3.0, rate=2.0
)
DIAGONAL = mbd.UnknownScale(mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(), mbd.Diagonal(prior=0.7)))
DISCOUNTED = mbd.UnknownScale(BAYESIAN, discount=True)


@dataclass(frozen=True)
class Rolling(mbd.Transition):
    """Rows move on by one and decay; without `row_drift`, so that no chunked kernel runs it."""

    step_parameters = (mbd.StepParameter("log_decay", "log a_t", bound="<= 0"),)

    @property
    def matrix(self):
        return mbd.Equation("A_t = a_t Π", r"\mathbf{A}_t = a_t \boldsymbol{\Pi}")

    def apply(self, x, step):
        return step["log_decay"].exp()[..., None, None] * x.roll(1, -2)


class Joint:
    """Posterior and density of all values at once, by dense conditioning; shared by the contracts below."""

    def quadratic(self, problem: Problem, b: int, h: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ v' C⁻¹ v over the columns of each group, and log det C, of the first t writes, [G]: C is that of τ = 1."""
        base = replace(problem.between(0, t), design=problem.design.base)
        G, M = problem.design.groups, problem.v.shape[-1]

        def evidence(v: torch.Tensor) -> torch.Tensor:
            return condition(replace(base, v=v), b, h).log_evidence

        # log N(v | 0, C) of one group at a time: the others' values are zero, and only shift it by a constant
        nothing = evidence(torch.zeros_like(base.v))
        squares = []
        for g in range(G):
            own = torch.zeros_like(base.v)
            own[..., g * M // G : (g + 1) * M // G] = base.v[..., g * M // G : (g + 1) * M // G]
            squares.append(-2 * (evidence(own) - nothing))
        return torch.stack(squares), nothing

    def joint(self, problem: Problem, b: int, h: int, t: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """a and b of the posterior, [G], and log p of the first t writes: a multivariate t of scale b₀/a₀ C."""
        design, G = problem.design, problem.design.groups
        squares, gaussian = self.quadratic(problem, b, h, t)
        n = t * problem.v.shape[-1] // G
        a0, b0 = (torch.tensor(x, dtype=torch.float64) for x in (design.shape, design.rate))
        a, rate = a0 + n / 2, b0 + squares / 2
        # gaussian = Σ_g −½(n log 2π + log det C_g), so this is Γ(a)/Γ(a₀) b₀^a₀ b^−a (2π)^−n/2 |C|^−½ for each group
        log_density = gaussian + (a.lgamma() - a0.lgamma() + a0 * b0.log() - a * rate.log()).sum()
        return a.expand(G), rate, log_density


class JointOracle(Joint, DesignContract):
    def oracle(self, problem):
        B, T, H, _ = problem.q.shape
        base = replace(problem, design=problem.design.base)
        means = [[condition(base, b, h).mean for h in range(H)] for b in range(B)]
        outputs = torch.stack(
            [
                torch.stack([torch.einsum("tdm,td->tm", means[b][h], problem.q[b, :, h]) for h in range(H)], 1)
                for b in range(B)
            ]
        )
        evidence = [torch.stack([self.joint(problem, b, h, T)[2] for h in range(H)]) for b in range(B)]
        return outputs, torch.stack(evidence)

    def test_belief_and_variance_equal_the_joint_posterior(self):
        problem = self.problem(B=1, T=6, H=2)
        out = problem.filter(return_variance=True, return_evidence=True)
        base = replace(problem, design=self.design.base)
        for h in range(2):
            covariance = condition(base, 0, h).covariance
            before = torch.zeros((), dtype=torch.float64)
            for t in range(6):
                a, rate, log_density = self.joint(problem, 0, h, t + 1)
                q = problem.q[0, t, h]
                variance = rate / (a - 1) * torch.einsum("d,gde,e->g", q, covariance[t], q)
                assert_close(out.variance[0, t, h], variance, 1e-10)
                assert_close(out.write_log_evidence[0, t, h], log_density - before, 1e-10)
                before = log_density
            a, rate, _ = self.joint(problem, 0, h, 6)
            assert_close(out.belief.shape[0, h], a, 1e-10)
            assert_close(out.belief.rate[0, h], rate, 1e-10)


class TestLoop(JointOracle):
    design = PLAIN


class TestChunk(JointOracle):
    design = PLAIN
    method = "chunk"
    chunk_size = 4


class TestNative(JointOracle):
    design = PLAIN
    method = "chunk"
    backend = "native"


class TestGroups(JointOracle):
    design = GROUPED


class TestGroupsNative(JointOracle):
    design = GROUPED
    method = "chunk"
    backend = "native"


class TestDiagonal(DesignContract):
    design = DIAGONAL
    method = "chunk"


class TestDiagonalNative(DesignContract):
    design = DIAGONAL
    method = "chunk"
    backend = "native"


class TestDiscounted(DesignContract):
    design = DISCOUNTED


class TestDiscountedInChunks(DesignContract):
    design = DISCOUNTED
    method = "chunk"
    backend = "torch"
    chunk_size = 4


class TestDiscountedNative(DesignContract):
    design = DISCOUNTED
    method = "chunk"
    backend = "native"


class TestNoKernel(JointOracle):
    """A base that only the loop runs."""

    design = mbd.UnknownScale(mbd.DesignModel(Rolling(), mbd.ObserveMemory(), mbd.Dense()))


def test_kernels_are_those_of_the_base():
    reasons = kernels.why_not_each(PLAIN)
    runs = [name for name, reason in reasons.items() if reason is None]
    assert runs == [
        "native, dense covariance, then its scale",
        "torch, dense covariance in chunks, then its scale",
        "loop over tokens",
    ]
    assert "diagonal covariance" in str(reasons["native, diagonal covariance, then its scale"])
    with pytest.raises(ValueError, match="^backend: expected .* flash-linear-attention.* got "):
        random_problem(PLAIN).filter(backend="fla")


def test_gains_are_those_of_the_base():
    problem = random_problem(PLAIN, T=40)
    ours, base = problem.filter(), replace(problem, design=BAYESIAN).filter()
    assert torch.equal(ours.output, base.output)
    assert torch.equal(ours.belief.mean, base.belief.mean)
    assert torch.equal(ours.belief.base.covariance, base.belief.covariance)


def test_a_sure_prior_is_the_base():
    """a₀ → ∞ with b₀ = a₀ − 1: the scale is known to be one."""
    design = mbd.UnknownScale(BAYESIAN, shape=1e9, rate=1e9)
    problem = random_problem(design)
    options = {"return_variance": True, "return_evidence": True}
    ours, base = problem.filter(**options), replace(problem, design=BAYESIAN).filter(**options)
    assert_close(ours.variance, base.variance, 1e-7)
    assert_close(ours.write_log_evidence, base.write_log_evidence, 1e-6)


def test_a_discount_of_one_is_none():
    problem = random_problem(mbd.UnknownScale(BAYESIAN), T=30)
    options = {"return_variance": True, "return_evidence": True}
    plain = problem.filter(**options)
    ones = replace(problem, design=DISCOUNTED).filter(discount=1.0, **options)
    assert_close(ones.variance, plain.variance, 1e-12)
    assert_close(ones.log_evidence, plain.log_evidence, 1e-12)
    assert_states_close(ones.belief, plain.belief)


def test_the_scan_takes_any_factor():
    generator = torch.Generator().manual_seed(0)
    factor, added = (
        torch.rand(2, 3, 37, 2, 1, generator=generator, dtype=torch.float64),
        torch.rand(2, 3, 37, 2, 1, generator=generator, dtype=torch.float64),
    )
    factor[:, :, ::5], factor[:, :, 3::7] = 0.0, 1.0
    start = torch.rand(2, 3, 1, 2, 1, generator=generator, dtype=torch.float64)
    x, expected = start[:, :, 0], []
    for t in range(37):
        x = factor[:, :, t] * x + added[:, :, t]
        expected.append(x)
    assert_close(scan(factor, added, start), torch.stack(expected, 2), 1e-13)


def test_a_discount_of_zero_forgets_everything():
    problem = random_problem(DISCOUNTED, B=1, H=1, T=6)
    problem.parameters["discount"][:, 4] = 0.0
    out = problem.filter(return_variance=True)
    other = problem.prior()._replace(rate=torch.full((1, 1, 1), 9.0, dtype=torch.float64))
    rest = problem.filter(return_variance=True, initial=other)
    assert not torch.equal(out.variance[:, :4], rest.variance[:, :4])
    assert torch.equal(out.variance[:, 4:], rest.variance[:, 4:])
    assert torch.equal(out.belief.rate, rest.belief.rate)
    with pytest.raises(mbd.NonFiniteError, match="log_evidence"):
        problem.filter(return_evidence=True)


@pytest.mark.parametrize("h", [0.5, 1.0, 2.0, 32.0, 500.0])
def test_log_gamma_ratio(h):
    a = torch.logspace(-3, 8, 200, dtype=torch.float64)
    assert_close(log_gamma_ratio(a[a < 20], h), (a + h).lgamma()[a < 20] - a.lgamma()[a < 20], 1e-12)
    single = log_gamma_ratio(a.float(), h).double()
    assert ((single - log_gamma_ratio(a.float().double(), h)).abs() <= 3e-6 * (1 + single.abs())).all()
    lost = ((a.float() + h).lgamma() - a.float().lgamma()).double()
    assert (lost - log_gamma_ratio(a.float().double(), h)).abs().max() > 0.1  # why there is such a function


def test_decoding_continues_with_variance_and_evidence():
    problem = random_problem(PLAIN, T=9)
    out = problem.filter(return_variance=True, return_evidence=True)
    state = problem.between(0, 8).filter().belief
    base = BAYESIAN.predict(state.base, mbd.Step({n: x[:, 8] for n, x in problem.parameters.items()}, problem.k[:, 8]))
    predicted = state._replace(base=base)
    evidence = predicted.log_evidence(problem.k[:, 8], problem.v[:, 8], problem.parameters["write_noise"][:, 8])
    assert_close(evidence, out.write_log_evidence[:, 8], 1e-12)
    y, state = problem.step(state, 8)
    assert isinstance(state, mbd.ScaledBelief)
    assert isinstance(state.base, mbd.Belief)
    assert_close(y, out.output[:, 8], 1e-12)
    assert_close(state.read(problem.q[:, 8]), y, 1e-12)
    assert_close(state.variance(problem.q[:, 8]), out.variance[:, 8], 1e-12)
    assert state.detach().to(torch.float32).rate.dtype == torch.float32


def test_beliefs_are_saved_without_code(tmp_path):
    belief = random_problem(DIAGONAL).filter().belief
    torch.save(belief, tmp_path / "belief.pt")
    again = torch.load(tmp_path / "belief.pt", weights_only=True)
    assert isinstance(again.base, mbd.DiagonalBelief)
    assert_states_close(again, belief, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mbd.UnknownScale(mbd.catalogue["kda"]), r"UnknownScale\(base\): expected a covariance .* got Reset"),
        (lambda: mbd.UnknownScale(mbd.catalogue["gla"]), r"UnknownScale\(base\): .* got LatentInput\(\)"),
        (lambda: mbd.UnknownScale(mbd.catalogue["robust_writes"]), r"UnknownScale\(base\): .* got StudentTWrite\(\)"),
        (lambda: mbd.UnknownScale(PLAIN), r"UnknownScale\(base\): expected a DesignModel"),
        (lambda: mbd.UnknownScale(BAYESIAN, shape=1.0), r"UnknownScale\(shape\): expected a finite number above 1"),
        (lambda: mbd.UnknownScale(BAYESIAN, rate=0.0), r"UnknownScale\(rate\): expected a finite number above 0"),
        (lambda: mbd.UnknownScale(BAYESIAN, discount=0.9), r"UnknownScale\(discount\): expected True or False"),
    ],
)
def test_what_has_no_scale_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_states_without_a_variance_are_refused():
    problem = random_problem(PLAIN)
    prior = problem.prior()
    with pytest.raises(ValueError, match=r"^initial.shape: expected numbers above 1, got 1 at index \[0, 0, 0\]"):
        problem.filter(initial=prior._replace(shape=torch.ones_like(prior.shape)))
    with pytest.raises(ValueError, match=r"^initial.rate: expected numbers above 0, got 0 at"):
        problem.filter(initial=prior._replace(rate=torch.zeros_like(prior.rate)))
    with pytest.raises(ValueError, match=r"^v: expected at least 3 columns .* got M = 2"):
        random_problem(DISCOUNTED, M=2).filter()


@pytest.mark.parametrize("of_memory", ["scaled", "as stated"])
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_intervals_cover_where_the_size_of_the_noise_is_unknown(factor, of_memory):
    """90 % predictive intervals of writes whose noise is `factor` times what is stated, after a burn-in of 64.

    The model scales all variances; with those of memory as stated, it is wrong about them and still close.
    """
    generator = torch.Generator().manual_seed(0)
    B, T, D, M, stated, drift, decay = 16, 320, 4, 4, 0.5, 0.02, 0.98

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(B, T, 1, D), dim=-1)
    own = factor if of_memory == "scaled" else 1.0
    S, values = own**0.5 * normal(B, D, M), []
    for t in range(T):
        S = decay * S + (own * drift) ** 0.5 * normal(B, D, M)
        values.append(torch.einsum("bd,bdm->bm", k[:, t, 0], S) + (factor * stated) ** 0.5 * normal(B, M))
    v = torch.stack(values, 1)[:, :, None]
    parameters = {"write_noise": stated, "process_noise": drift, "log_decay": torch.tensor(decay).log().item()}
    covered = {}
    for name, design in (("known", BAYESIAN), ("unknown", mbd.UnknownScale(BAYESIAN))):
        out = mbd.filter_sequence(design, k, k, v, **parameters)
        state, hits = Problem(design, k, k, v, {}).prior(), []
        for t in range(T):
            plain = state.base if isinstance(state, mbd.ScaledBelief) else state
            step = {key: torch.full((B, 1), value, dtype=torch.float64) for key, value in parameters.items()}
            step["write_noise"] = step["write_noise"][..., None]
            step["log_decay"] = step["log_decay"][..., None].expand(B, 1, D)
            plain = BAYESIAN.predict(plain, mbd.Step(step, k[:, t]))
            width = (stated + plain.variance(k[:, t])).sqrt()
            z = torch.full_like(width, 1.6449)
            if isinstance(state, mbd.ScaledBelief):
                width, z = width * (state.rate / state.shape).sqrt(), _t_quantile(2 * state.shape)
            if t >= 64:
                hits.append(((v[:, t] - plain.read(k[:, t])).abs() <= z * width).double())
            _, state = mbd.filter_step(design, state, k[:, t], k[:, t], v[:, t], **parameters)
        assert_close(state.mean, out.belief.mean, 1e-9)
        covered[name] = torch.stack(hits).mean().item()
    assert 0.88 <= covered["unknown"] <= 0.92
    assert not 0.85 <= covered["known"] <= 0.95


def _t_quantile(degrees):
    """The 95 % quantile of Student's t, by its expansion around the Gaussian's (Abramowitz & Stegun 26.7.5)."""
    z = 1.6448536269514722
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees ** (n + 1) for n, term in enumerate(terms))


def test_variance_of_reads_learns_the_scale():
    """The read variance of ten times larger values is a hundred times larger; the base's does not change."""
    problem = random_problem(mbd.UnknownScale(BAYESIAN, shape=1.01, rate=1e-6), T=200)
    options = {"return_variance": True}
    once, ten = problem.filter(**options), replace(problem, v=10 * problem.v).filter(**options)
    assert_close(ten.variance[:, 50:] / once.variance[:, 50:], torch.full_like(ten.variance[:, 50:], 100.0), 1e-3)


@pytest.mark.parametrize("discount", [False, True])
def test_layers_train(discount):
    torch.manual_seed(0)
    design = mbd.UnknownScale(BAYESIAN, discount=discount)
    layer = mbd.MemoryLayer(design, 16, num_heads=2, head_dim=8)
    assert layer.state_size().total == 2 * design.state_size(8, 8).total
    x = torch.randn(4, 24, 16)
    optimiser, losses = torch.optim.Adam(layer.parameters(), lr=0.01), []
    for _ in range(20):
        y, _, uncertainty = layer(x, return_variance=True, return_evidence=True)
        loss = (y - x.roll(1, 1)).square().mean() - 0.01 * uncertainty.log_evidence.mean() + uncertainty.variance.mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_layers_by_name_take_options_of_the_base():
    layer = mbd.make_layer("unknown_scale", 16, num_heads=2, head_dim=8, groups=2, prior=0.5, transition="scalar")
    base = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(groups=2), mbd.Dense(prior=0.5))
    assert layer.design == mbd.UnknownScale(base)
    assert "UnknownScale(shape=2, rate=1)" in str(layer)
