"""Stationary process noise: the joint Gaussian, the bound P ⪯ σ²I, kernels, users' transitions, layers."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import membydesign as mbd
from examples.own_designs import rwkv7
from membydesign import DesignModel, Stationary, catalogue
from membydesign.filter.native.step import native_step
from membydesign.layers import MemoryLayer, make_layer
from membydesign.testing import DesignContract, assert_close, condition, random_problem
from membydesign.testing.oracles import noise_matrices, transition_matrices
from problems import STATIONARY, TRANSITIONS


@dataclass(frozen=True)
class Kept(mbd.Transition):
    """A user's transition with nothing but A_t x: all rows keep a share of one parameter."""

    step_parameters = (mbd.StepParameter("share", "s_t", bound="[0, 1]", idle=1.0),)

    @property
    def matrix(self):
        return mbd.Equation("A_t = s_t I", r"\mathbf{A}_t = s_t \mathbf{I}")

    def apply(self, x, step):
        return step["share"][..., None, None] * x


@dataclass(frozen=True)
class Shear(mbd.Transition):
    """A user's transition that mixes rows, A_t = ½ (s_t I + the rows in turn): ‖A_t‖ ≤ 1."""

    step_parameters = Kept.step_parameters

    @property
    def matrix(self):
        return mbd.Equation("A_t = (s_t I + shift)/2", r"\mathbf{A}_t = (s_t \mathbf{I} + \mathbf{R})/2")

    def apply(self, x, step):
        return 0.5 * (step["share"][..., None, None] * x + x.roll(1, -2))


OWN = {"own": Stationary(Kept()), "own_mixing": Stationary(Shear())}
EVERY = {**STATIONARY, **OWN}


def dense(transition: mbd.Transition, prior: float = 1.0, groups: int = 1) -> DesignModel:
    return DesignModel(transition, mbd.ObserveMemory(groups=groups), mbd.Dense(prior=prior))


def with_constant_variance(problem, variance: float):
    """The same problem with one σ² for all tokens, and writes between very sure and hardly sure."""
    parameters = dict(problem.parameters)
    parameters["stationary_variance"] = torch.full_like(parameters["stationary_variance"], variance)
    parameters["write_noise"] = parameters["write_noise"].pow(3)
    return replace(problem, parameters=parameters)


class TestOwnTransition(DesignContract):
    """A user's transition, of which the library knows A_t x alone; tests/filter/test_contract.py has our own."""

    design = dense(OWN["own_mixing"], prior=1.5, groups=2)
    test_65536_tokens_in_float32: Any = None  # in chunks only


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_the_joint_gaussian(name, groups):
    """Q_t is σ²(I − A Aᵀ) as matrices, and every filter conditions the joint Gaussian that it gives."""
    problem = random_problem(dense(EVERY[name], 0.7, groups), T=9, D=6, H=1)
    matrices = zip(transition_matrices(problem, 1, 0), noise_matrices(problem, 1, 0), strict=True)
    for t, (A, Q) in enumerate(matrices):
        variance = problem.parameters["stationary_variance"][1, t, 0]
        assert_close(Q, variance * (torch.eye(6, dtype=torch.float64) - A @ A.T), 1e-14)
    exact = condition(problem, 1, 0)
    ways: list[dict[str, Any]] = [{"method": "recurrent"}, {}]
    if name in STATIONARY:
        ways += [{"backend": "torch", "chunk_size": 4}, {"backend": "native", "chunk_size": 4}, {"chunk_size": 1}]
    for way in ways:
        out = problem.filter(**way, return_variance=True, return_evidence=True)
        q, variance = problem.q[1, :, 0], out.variance
        assert variance is not None
        assert out.log_evidence is not None
        assert_close(out.output[1, :, 0], torch.einsum("td,tdm->tm", q, exact.mean), 1e-10)
        assert_close(variance[1, :, 0], torch.einsum("td,tgde,te->tg", q, exact.covariance, q), 1e-10)
        assert_close(out.belief.covariance[1, 0], exact.covariance[-1], 1e-10)
        assert_close(out.log_evidence[1, 0], exact.log_evidence, 1e-10)


@pytest.mark.parametrize("way", [{"backend": "torch", "chunk_size": 3}, {"backend": "native"}, {"chunk_size": 4}])
@pytest.mark.parametrize("name", ["stationary_scalar", "stationary_diagonal", "stationary_rotation_real"])
def test_gradients_by_finite_differences(name, way):
    """Also those of the decay, which reaches memory through the noise as well."""
    problem = random_problem(dense(STATIONARY[name]), B=1, T=4, H=1, D=2, M=2)
    names = list(problem.parameters)

    def results(q, k, v, *parameters):
        changed = replace(problem, q=q, k=k, v=v, parameters=dict(zip(names, parameters, strict=True)))
        out = changed.filter(**way, return_variance=True, return_evidence=True)
        results = (out.output, out.variance, out.log_evidence, out.belief.mean, out.belief.covariance)
        return tuple(x for x in results if x is not None)

    leaves = [problem.q, problem.k, problem.v, *problem.parameters.values()]
    assert torch.autograd.gradcheck(results, [x.clone().requires_grad_() for x in leaves], atol=1e-7)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
@pytest.mark.parametrize("kept", [mbd.Dense, mbd.Diagonal])
@pytest.mark.parametrize("name", STATIONARY)
def test_covariances_never_exceed_the_prior(name, kept, dtype, rounding):
    """σ²I − P is positive semi-definite after any writes, of every kernel, in random trials."""
    for seed, D in enumerate((2, 4, 8, 16)):
        design = DesignModel(STATIONARY[name], mbd.ObserveMemory(groups=2), kept(prior=1.7))
        problem = with_constant_variance(random_problem(design, T=50, D=D, H=1, seed=seed), 1.7).map(
            lambda x: x.to(dtype)
        )
        for way in ({"method": "recurrent"}, {"backend": "torch"}, {"backend": "native"}):
            belief = problem.filter(**way).belief
            below = 1.7 * torch.eye(D, dtype=dtype) - belief.dense_covariance()
            assert torch.linalg.eigvalsh(below.double()).min() >= -rounding * 1.7


@pytest.mark.parametrize("way", [{"backend": "torch"}, {"backend": "native"}, {"backend": "native", "chunk_size": 1}])
@pytest.mark.parametrize("decay", [-1e-5, -1e-3, -0.3])
def test_what_nobody_writes_keeps_the_prior_for_ever(way, decay):
    """However many tokens pass, but for the rounding of each decay; free process noise would reach ℓ²/(1 − α²)."""
    design, T, D = dense(STATIONARY["stationary_diagonal"], prior=2.0), 8192, 4
    k = torch.zeros(1, T, 1, D)
    k[..., 0] = 1.0
    out = mbd.filter_sequence(
        design, k, k, k, log_decay=torch.full((1, T, 1, D), decay), stationary_variance=2.0, write_noise=0.5, **way
    )
    P = out.belief.covariance[0, 0, 0]
    torch.testing.assert_close(P[1:, 1:], 2.0 * torch.eye(D - 1), rtol=1e-3, atol=1e-6)
    assert P[0, 0] < 2.0


def test_without_any_memory_of_the_past():
    """A decay to nothing leaves the prior before every write: a gain of σ²/(σ²‖k‖² + r²), by hand."""
    problem = random_problem(dense(STATIONARY["stationary_scalar"]), T=6)
    problem.parameters["log_decay"] = torch.full_like(problem.parameters["log_decay"], -1000.0)
    prior, noise = problem.parameters["stationary_variance"], problem.parameters["write_noise"].squeeze(-1)
    gain = prior / (prior * problem.k.square().sum(-1) + noise)
    expected = (gain * (problem.q * problem.k).sum(-1))[..., None] * problem.v
    for way in ({"method": "recurrent"}, {"backend": "torch"}, {"backend": "native"}):
        assert_close(problem.filter(**way).output, expected, 1e-12)


@pytest.mark.parametrize("kept", [mbd.Dense(), mbd.Diagonal()])
@pytest.mark.parametrize("name", STATIONARY)
def test_native_decoding_steps(name, kept):
    problem = random_problem(DesignModel(STATIONARY[name], mbd.ObserveMemory(groups=2), kept), T=6)
    out, state = problem.filter(method="recurrent"), problem.prior()
    for t in range(6):
        now = {parameter: x[:, t] for parameter, x in problem.parameters.items()}
        result = native_step(problem.design, state, problem.q[:, t], problem.k[:, t], problem.v[:, t], now)
        assert result is not None, "step.c should run it"
        y, state = result
        assert_close(y, out.output[:, t], 1e-12)
    assert_close(state.covariance, out.belief.covariance, 1e-12)


ROWS = [
    name
    for name, design in catalogue.items()
    if design.with_stationary_noise() is not None and name != "stationary_bayesian_layer"
]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_catalogue_with_process_noise(name):
    """Kernels of any covariance or write either know stationary noise or leave it to the loop."""
    design = catalogue[name].with_stationary_noise()
    assert design is not None
    assert [p.name for p in design.step_parameters if "noise" in p.name or "stationary" in p.name] == [
        "stationary_variance",
        "write_noise",
    ]
    problem = random_problem(design, T=19, D=8)
    options = {"return_variance": design.has_variance, "return_evidence": True}
    loop, fast = problem.filter(method="recurrent", **options), problem.filter(**options)
    assert_close(fast.output, loop.output, 1e-10)
    assert_close(fast.log_evidence, loop.log_evidence, 1e-10)
    if design.has_variance:
        assert_close(fast.variance, loop.variance, 1e-10)


class TestRemoval:
    """RWKV-7's transition of somebody's own: stationary where it adds to no direction."""

    design = dense(Stationary(rwkv7.RWKV7Transition()))

    def problem(self, T: int = 6):
        problem = random_problem(self.design, T=T)
        retention = problem.parameters["retention"]
        rate = problem.parameters["erase_rate"]
        same = {"retention": retention[..., :1].expand_as(retention), "erase_rate": rate[..., :1].expand_as(rate)}
        return replace(problem, parameters={**problem.parameters, **same})

    def test_equals_the_joint_gaussian(self):
        """With one retention and one rate for all rows, A is symmetric and ‖A‖ ≤ 1."""
        problem = self.problem()
        exact = condition(problem, 0, 1)
        assert_close(problem.filter().belief.covariance[0, 1], exact.covariance[-1], 1e-10)
        with pytest.raises(ValueError, match="^backend: .* for Stationary"):
            problem.filter(backend="native")

    def test_a_transition_that_grows_has_no_stationary_law(self):
        problem = self.problem(T=3)
        key = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        retention, rate = torch.ones(4).double(), torch.tensor([1.0, 0.0, 0.0, 0.0]).double()
        shape = problem.parameters["retention"].shape
        bad = {"retention": retention, "erase_key": key, "erase_rate": rate}
        problem = replace(problem, parameters={**problem.parameters, **{n: x.expand(shape) for n, x in bad.items()}})
        with pytest.raises(mbd.NotPositiveDefiniteError, match=r"expected ‖A_t‖ ≤ 1.*got the eigenvalue -.* batch 0"):
            problem.filter()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stationary(mbd.Identity), "Stationary.drift.: expected another Transition"),  # pyright: ignore
        (lambda: Stationary(Stationary(mbd.Identity())), "expected another Transition, got Stationary"),
        (lambda: DesignModel(Stationary(mbd.ScalarDecay()), mbd.ObserveMemory(), mbd.Reset()), "no process noise"),
        (lambda: DesignModel(Stationary(mbd.ScalarDecay()), mbd.LatentInput(), mbd.MeanOnly()), "use ScalarDecay"),
    ],
)
def test_what_has_no_meaning_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_it_says_what_it_is():
    text = str(catalogue["stationary_bayesian_layer"].describe())
    assert "N(A_t S_{t-1}, σ_t² (I − A_t A_tᵀ))" in text
    assert "P̄_t = A_t P_{t-1} A_tᵀ + σ_t² (I − A_t A_tᵀ)" in text
    assert "ℓ" not in text
    assert "N = I" in str(catalogue["bayesian_layer"].describe())


class TestLayers:
    """The option of layers on the scaffold, and what it keeps."""

    def test_an_option_of_any_layer_with_process_noise(self):
        for name in ("bayesian_layer", "bayesian_layer_rotating", "bayesian_layer_diagonal", "unknown_scale"):
            layer = make_layer(name, 32, num_heads=2, head_dim=8, process_noise="stationary")
            x = torch.randn(2, 20, 32)
            y, belief = layer(x[:, :11])
            again, _ = layer(x[:, 11:], belief)
            whole, _ = layer(x)
            torch.testing.assert_close(torch.cat((y, again), 1), whole, rtol=1e-4, atol=1e-5)
            assert "Stationary(" in repr(layer)
        same = MemoryLayer("bayesian_layer", 32, 2, 8, process_noise="stationary")
        assert same.design == catalogue["stationary_bayesian_layer"]

    def test_memory_returns_to_where_it_starts(self):
        layer = make_layer("stationary_bayesian_layer", 32, num_heads=2, head_dim=8, prior=3.0, transition="rotation")
        assert isinstance(layer, MemoryLayer)
        assert layer.design == dense(Stationary(TRANSITIONS["rotation"]), prior=3.0)
        assert layer.noises["stationary_variance"].source == 3.0
        _, belief = layer(torch.randn(1, 50, 32))
        assert torch.linalg.eigvalsh(belief.memory.covariance).max() <= 3.0 + 1e-4

    def test_another_source_of_the_variance(self):
        options = json.loads('{"process_noise": "stationary", "sources": {"stationary_variance": {"learned": 0.4}}}')
        layer = make_layer("bayesian_layer", 32, num_heads=2, head_dim=8, **options)
        y, _ = layer(torch.randn(1, 9, 32))
        y.square().sum().backward()
        gradient = layer.noises["stationary_variance"].bias.grad  # pyright: ignore
        assert gradient is not None
        assert gradient.abs().min() > 0

    @pytest.mark.parametrize(
        ("name", "option", "message"),
        [
            ("kda_style", "stationary", "process_noise: expected None, since KDA"),
            ("count_memory", "stationary", "process_noise: expected None"),
            ("bayesian_layer", "stationery", 'process_noise: expected Learned.*"stationary", got'),
            ("stationary_bayesian_layer", 0.1, "process_noise: expected None"),
        ],
    )
    def test_refusals(self, name, option, message):
        with pytest.raises(ValueError, match=message):
            make_layer(name, 32, num_heads=2, head_dim=8, process_noise=option)

    def test_a_model_from_json(self, tmp_path):
        pytest.importorskip("transformers")
        from membydesign.models import MemoryConfig, MemoryForCausalLM

        options = {"bayesian_layer": {"process_noise": "stationary"}}
        config = MemoryConfig(
            vocab_size=20, hidden_size=32, num_heads=2, head_dim=8, num_hidden_layers=2, layer_options=options
        )
        model = MemoryForCausalLM(config).eval()
        model.save_pretrained(tmp_path)
        again = MemoryForCausalLM.from_pretrained(tmp_path).eval()
        tokens = torch.arange(12)[None]
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
        assert (
            sum(
                isinstance(module, MemoryLayer) and module.design == catalogue["stationary_bayesian_layer"]
                for module in again.modules()
            )
            == 2
        )
