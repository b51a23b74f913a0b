"""Designs: which have a meaning, what they say about themselves, and whether it is true."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import membydesign as mbd
from membydesign import DesignModel, catalogue
from membydesign.filter.checks import check_inputs
from problems import DESIGNS, random_problem


class Fading(mbd.Transition):
    """A transition of somebody's own, whose parameter has a name of its own."""

    step_parameters = (mbd.StepParameter("retention", "ρ", bound="[0, 1]"),)

    @property
    def matrix(self):
        return mbd.Equation("A", "A")

    def apply(self, x, step):
        return step["retention"][..., None, None] * x


class TwiceWriteNoise(mbd.Transition):
    """A transition that asks for what the write asks for."""

    step_parameters = (mbd.StepParameter("write_noise", "ρ"),)

    @property
    def matrix(self):
        return mbd.Equation("A", "A")

    def apply(self, x, step):
        return x


MEANINGLESS = [
    (TwiceWriteNoise(), mbd.ObserveMemory(), mbd.Dense(), "two parts ask for a step parameter named write_noise"),
    (mbd.Identity(), mbd.LatentInput(), mbd.Reset(), "LatentInput's mean never reads a covariance"),
    (mbd.Identity(), mbd.LatentInput(), mbd.PerColumnReset(), "nothing for PerColumnReset to approximate"),
    (mbd.ScalarDecay(), mbd.LatentInput(), mbd.Diagonal(), "nothing for Diagonal to approximate"),
    (mbd.Identity(), mbd.ObserveMemory(), mbd.MeanOnly(), "MeanOnly leaves it undefined"),
    (mbd.Identity(), mbd.ObserveMemory(groups=2), mbd.PerColumnReset(), "ObserveMemory(groups=2) would group again"),
    (mbd.DampedRotation(noise="real"), mbd.ObserveMemory(), mbd.Reset(), "this design has no process noise"),
    (mbd.DampedRotation(noise="real"), mbd.LatentInput(), mbd.MeanOnly(), "this design has no process noise"),
    (mbd.DampedRotation(noise="real"), mbd.LatentInput(), mbd.Dense(), "this design has no process noise"),
]


@pytest.mark.parametrize(("transition", "write", "covariance", "reason"), MEANINGLESS)
def test_meaningless_combinations_say_why(transition, write, covariance, reason):
    with pytest.raises(ValueError) as error:
        DesignModel(transition, write, covariance)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mbd.Identity, mbd.ObserveMemory(), mbd.Dense()), r"DesignModel\(transition\): .*; write Identity\(\)"),
        ((mbd.Identity(), mbd.Dense(), mbd.Dense()), r"DesignModel\(write\): expected an instance of Write"),
        ((mbd.Identity(), mbd.ObserveMemory(), None), r"DesignModel\(covariance\): .*, got None"),
    ],
)
def test_components_of_the_wrong_kind_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DesignModel(*arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mbd.ObserveMemory(groups=0), "groups.*at least 1, got 0"),
        (lambda: mbd.ObserveMemory(groups=1.5), "groups.*got 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: mbd.ObserveMemory(groups=True), "groups.*got True"),
        (lambda: mbd.Dense(prior=-1.0), r"Dense\(prior\).*got -1.0"),
        (lambda: mbd.Dense(prior=float("nan")), "got nan"),
        (lambda: mbd.Diagonal(prior=float("inf")), r"Diagonal\(prior\).*got inf"),
        (lambda: mbd.DampedRotation("imaginary"), "DampedRotation.*got 'imaginary'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_components_refuse_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_designs_are_frozen_and_compare_by_their_assumptions():
    design = catalogue["deltanet"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        design.write = mbd.LatentInput()  # pyright: ignore[reportAttributeAccessIssue]
    assert design == DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Reset())
    assert hash(design) == hash(DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Reset()))
    assert design.replace(transition=mbd.ScalarDecay()) == catalogue["gated_deltanet"]
    assert design != catalogue["gated_deltanet"]


def test_a_design_that_comes_from_another_process_is_found_by_its_assumptions():
    """Hashes of strings differ between processes, so the remembered hash must not travel."""
    design = DesignModel(mbd.DampedRotation(noise="real"), mbd.ObserveMemory(), mbd.Dense())
    assert {design: 1}[design] == 1
    again = pickle.loads(pickle.dumps(design))
    assert "_hash" in vars(design)
    assert "_hash" not in vars(again)
    assert {again: 1}[design] == 1


def test_the_catalogue_holds_table_one_the_ablations_and_designs_beyond_them():
    assert list(catalogue) == [
        "bayesian_layer",
        "bayesian_layer_diagonal",
        "covariance_reset",
        "stationary_bayesian_layer",
        "partial_reset",
        "discounted",
        "unknown_scale",
        "robust_writes",
        "block_diagonal",
        "low_rank",
        "deltanet",
        "gated_deltanet",
        "kda",
        "longhorn",
        "linear_attention",
        "retnet",
        "gla",
        "mamba2",
        "mesa_net",
        "gated_kalmanet",
        "kla",
        "palimpsa",
        "kalman_delta_isotropic",
        "kalman_delta_diagonal",
        "vla",
        "preconditioned_deltanet",
        "gated_deltanet_2",
        "deltaproduct",
        "comba",
        "rwkv7",
        "mlstm",
        "count_memory",
        "categorical_memory",
        "hidden_markov",
    ]
    # Table 1's column "Derivation", covariances that forget, unknown_scale, MesaNet's regression, two relatives whose
    # erasing is a drift, and the conjugate beliefs
    assert [name for name, design in catalogue.items() if design.exactness == "exact filter"] == [
        "bayesian_layer",
        "stationary_bayesian_layer",
        "partial_reset",
        "discounted",
        "unknown_scale",
        "linear_attention",
        "retnet",
        "gla",
        "mamba2",
        "mesa_net",
        "comba",
        "rwkv7",
        "count_memory",
        "categorical_memory",
        "hidden_markov",
    ]
    assert all(design.citation and design.title for design in catalogue.values())
    with pytest.raises(KeyError, match="no design named 'gdn'.*gated_deltanet"):
        catalogue["gdn"]


@pytest.mark.parametrize("name", DESIGNS)
def test_descriptions_are_complete_and_typeset(name):
    """Text names exactness, state, cost and every parameter; every line of LaTeX is parsed by a real typesetter."""
    from matplotlib.mathtext import MathTextParser

    design = DESIGNS[name]
    description = design.describe()
    text = str(description)
    assert design.exactness in text
    assert design.cost_order in text
    assert f"{design.state_size(64, 64).total:,} at D = M = 64" in text
    for parameter in design.step_parameters:
        assert f"{parameter.name} = {parameter.symbol}" in text
    parser = MathTextParser("path")
    equations = [equation for _, equations in description.parts for equation in equations]
    assert len(equations) >= 5
    for equation in equations:
        parser.parse(f"${equation.latex}$")
        assert equation.latex in description.latex
    assert description.latex.startswith(r"\begin{aligned}")
    assert description.latex in description._repr_markdown_()


class CountMultiplications(TorchDispatchMode):
    """Counts scalar multiplications: one for each entry of a product, rows × columns × inner for matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mul", "square"):
            self.count += out.numel()
        elif name in ("bmm", "mm"):
            self.count += out.numel() * args[0].shape[-1]
        return out


def count(design: DesignModel, D: int, M: int) -> int:
    problem = random_problem(design, B=1, T=1, H=1, D=D, M=M)
    inputs = check_inputs(design, problem.q, problem.k, problem.v, problem.parameters, lead="B,T,H")
    step, state = inputs.step(0), problem.prior()
    with CountMultiplications() as counter:
        written = design.condition(design.predict(state, step), inputs.k[:, 0], inputs.v[:, 0], step)
        mbd.Belief(written.state.mean).read(inputs.q[:, 0])
    return counter.count


@pytest.mark.parametrize("name", [name for name in DESIGNS if not name.startswith("diagonal")])
def test_declared_cost_is_the_measured_one(name):
    """The declared multiplications, against those that the specification really does, at large D and M.

    The loop does a few more than it must (it scales outer products, and moves noise that a diagonal would hold), so the
    count may exceed the declaration by a bounded factor; it may not grow faster.
    """
    design = DESIGNS[name]
    for D, M in ((64, 64), (128, 64), (64, 128)):
        assert 0.95 <= count(design, D, M) / design.multiplications(D, M) <= 2.6
    for sizes in ((256, 128), (128, 256)):
        declared = design.multiplications(*sizes) / design.multiplications(128, 128)
        measured = count(design, *sizes) / count(design, 128, 128)
        assert measured == pytest.approx(declared, rel=0.12)


def test_a_diagonal_covariance_needs_no_matrix():
    """Diagonal declares G·D + D·M. The specification forms matrices; this step of that cost gives the same numbers."""
    design = DESIGNS["diagonal-diagonal"]
    D, M, T = 6, 4, 5
    problem = random_problem(design, B=1, T=T, H=1, D=D, M=M)
    expected = problem.filter()
    mean, p = torch.zeros(D, M, dtype=torch.float64), torch.full((D,), 1.5, dtype=torch.float64)
    for t in range(T):
        k, v, a = problem.k[0, t, 0], problem.v[0, t, 0], problem.parameters["log_decay"][0, t, 0].exp()
        l2, r2 = (problem.parameters[n][0, t, 0].reshape(()) for n in ("process_noise", "write_noise"))
        p = a * a * p + l2
        u = p * k
        beta = 1 / (r2 + k @ u)
        mean = a[:, None] * mean
        mean = mean + torch.outer(beta * u, v - mean.T @ k)
        p = p - beta * u * u
        torch.testing.assert_close(expected.output[0, t, 0], mean.T @ problem.q[0, t, 0], rtol=1e-12, atol=1e-12)


def test_real_rows_are_the_paper_s_observations():
    """Keys and queries on real rows only: imaginary rows are never observed, and noise="real" keeps them bounded."""
    k = torch.nn.functional.normalize(
        torch.randn(1, 300, 1, 3, generator=torch.Generator().manual_seed(0)).double(), dim=-1
    )
    v = torch.zeros(1, 300, 1, 2, dtype=torch.float64)
    largest = {}
    for noise in ("all", "real"):
        design = DesignModel(mbd.DampedRotation(noise=noise), mbd.ObserveMemory(), mbd.Dense())
        keys = mbd.real_rows(k)
        assert torch.equal(keys[..., 1::2], torch.zeros_like(k))
        out = mbd.filter_sequence(design, keys, keys, v, process_noise=0.1, write_noise=0.1, log_decay=0.0, angle=0.0)
        assert out.belief.covariance is not None
        largest[noise] = out.belief.covariance[0, 0, 0].diagonal()[1::2].max().item()
    assert largest["real"] == pytest.approx(1.0)  # the prior, untouched
    assert largest["all"] == pytest.approx(1.0 + 300 * 0.1)  # inflated by noise that no write ever removes


def test_step_parameters_are_checked():
    with pytest.raises(ValueError, match=r"StepParameter\(axes\).*got \('2D',\)"):
        mbd.StepParameter("log_decay", "a", axes=("2D",))
    with pytest.raises(ValueError, match=r"StepParameter\(bound\).*got '< 5'"):
        mbd.StepParameter("log_decay", "a", bound="< 5")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"StepParameter\(name\).*got 'cu_seqlens'"):
        mbd.StepParameter("cu_seqlens", "a")

    class NoTuple(Fading):
        step_parameters = mbd.StepParameter("log_decay", "a")

    with pytest.raises(ValueError, match="NoTuple.step_parameters must be a tuple of StepParameter"):
        DesignModel(NoTuple(), mbd.ObserveMemory(), mbd.Dense())


def test_a_transition_of_ones_own_is_filtered_under_its_own_names():
    """The same memory as ScalarDecay, whose parameter is called otherwise and is not a logarithm."""
    design = DesignModel(Fading(), mbd.ObserveMemory(), mbd.Dense())
    known = random_problem(DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(), mbd.Dense()))
    expected = known.filter(method="recurrent")
    parameters: dict[str, Any] = {
        "retention" if name == "log_decay" else name: x for name, x in known.parameters.items()
    }
    parameters["retention"] = parameters["retention"].exp()
    out = mbd.filter_sequence(design, known.q, known.k, known.v, **parameters)
    torch.testing.assert_close(out.output, expected.output, rtol=1e-14, atol=1e-14)
    with pytest.raises(ValueError, match="^retention: expected values in \\[0, 1\\], got 1.5 at batch 0"):
        mbd.filter_sequence(design, known.q, known.k, known.v, **{**parameters, "retention": 1.5})
    with pytest.raises(ValueError, match="^retention: expected a value for .*, which needs retention .*got log_decay"):
        mbd.filter_sequence(design, known.q, known.k, known.v, **dict[str, Any](known.parameters))


def test_a_transition_must_keep_the_shape():
    class Drops(Fading):
        step_parameters = ()

        def apply(self, x, step):
            return x[..., :1, :]

    x = torch.ones(1, 2, 1, 4)
    design = DesignModel(Drops(), mbd.ObserveMemory(), mbd.Dense())
    with pytest.raises(ValueError, match=r"Drops.apply: expected to return the shape of x, \[1, 1, 4, 4\]"):
        mbd.filter_sequence(design, x, x, x, process_noise=0.1, write_noise=0.1)
