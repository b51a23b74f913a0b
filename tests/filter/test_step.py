"""The decoding step in native code gives what the long way gives: the same numbers, and the same refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign import Belief, catalogue
from membydesign.filter import api
from membydesign.filter.native import step
from problems import DESIGNS, random_belief, random_problem

Arguments = dict[str, Any]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
FEW = {name: DESIGNS[name] for name in DESIGNS if name.endswith(("-scalar", "-rotation"))}


def arguments(design: mbd.DesignModel, dtype: torch.dtype = torch.float64, **sizes: int) -> Arguments:
    """A step that a user might take, with inputs that are slices of longer ones."""
    problem = random_problem(design, T=2, dtype=dtype, **sizes)
    belief = random_belief(design, **sizes).map(lambda x: x.to(dtype))
    now = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters}
    return {"belief": belief, **{name: x[:, 1] for name, x in now.items()}}


def native(design: mbd.DesignModel, belief: Belief, q: Any, k: Any, v: Any, **parameters: Any) -> Any:
    return step.native_step(design, belief, q, k, v, parameters)


def long_way(design: mbd.DesignModel, given: Arguments) -> tuple[torch.Tensor, Belief]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "native_step", lambda *_: None)
        return mbd.filter_step(design, **given)


def assert_same_step(design: mbd.DesignModel, given: Arguments) -> None:
    found, (output, belief) = native(design, **given), long_way(design, given)
    assert found is not None, "native code declined"
    for ours, theirs in zip((found[0], *found[1]), (output, *belief), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            tolerance = TOLERANCE.get(ours.dtype, 1e-2)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_refusal(design: mbd.DesignModel, given: Arguments) -> str:
    """Native code declines, and the user gets the error of the long way."""
    assert native(design, **given) is None
    with pytest.raises((ValueError, ArithmeticError)) as expected:
        long_way(design, given)
    with pytest.raises(type(expected.value)) as error:
        mbd.filter_step(design, **given)
    assert str(error.value) == str(expected.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DESIGNS)
def test_same_numbers(name, dtype):
    for sizes in ({}, {"B": 3, "H": 5, "D": 6, "M": 8}, {"B": 1, "D": 34, "M": 20}):
        given = arguments(DESIGNS[name], dtype, **sizes)
        before = given["belief"].map(torch.clone)
        assert_same_step(DESIGNS[name], given)
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(given["belief"], before, strict=True))


@pytest.mark.parametrize("write", [mbd.LatentInput(), mbd.ObserveMemory(), mbd.ObserveMemory(groups=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_removal(write, dtype):
    """RWKV-7's memory, and the delta rules with its transition; a covariance is not moved by it."""
    covariance = mbd.Reset() if write.observes_memory else mbd.MeanOnly()
    design = mbd.DesignModel(mbd.DecayAndRemoval(), write, covariance)
    for sizes in ({}, {"B": 3, "H": 5, "D": 7, "M": 8}, {"B": 1, "D": 34, "M": 20}):
        given = arguments(design, dtype, **sizes)
        given |= {name: given[name] / given[name].norm(dim=-1, keepdim=True) for name in ("removal", "removal_key")}
        assert_same_step(design, given)
        assert_same_step(design, {**given, "removal": 0.25, "removal_key": torch.tensor(0.5, dtype=dtype)})
    for name in ("removal", "removal_key"):
        bad = given[name].clone()
        bad[0, 0, 0] = torch.nan
        assert name in assert_same_refusal(design, {**given, name: bad})
    kept = mbd.DesignModel(mbd.DecayAndRemoval(), mbd.ObserveMemory(), mbd.Dense())
    assert native(kept, **arguments(kept)) is None


@pytest.mark.parametrize("name", ["dense-diagonal", "reset-scalar", "additive_dense-identity"])
def test_odd_sizes_and_several_threads(name):
    assert_same_step(DESIGNS[name], arguments(DESIGNS[name], D=7, M=3))
    assert_same_step(DESIGNS[name], arguments(DESIGNS[name], D=64, M=64, B=4, H=8))


@pytest.mark.parametrize("name", DESIGNS)
def test_covariance_stays_symmetric(name):
    design = DESIGNS[name]
    given = arguments(design, torch.float32, D=18, M=4)
    given["belief"] = Belief.prior(design, 2, 2, 18, 4)
    for _ in range(3):
        _, given["belief"] = native(design, **given)
    if isinstance(design.covariance, mbd.Dense):
        P = given["belief"].dense_covariance()
        assert torch.equal(P, P.mT)


@pytest.mark.parametrize("name", FEW)
def test_every_form_of_a_parameter(name):
    """Numbers, tensors without axes, and one write noise for all groups."""
    design, given = FEW[name], arguments(FEW[name])
    for parameter in design.step_parameters:
        value = given[parameter.name]
        number = value.flatten()[0].item()
        for other in (number, torch.tensor(number, dtype=torch.float64)):
            assert_same_step(design, {**given, parameter.name: other})
        if parameter.optional_axes:
            assert_same_step(design, {**given, parameter.name: value[..., 0]})
    if not design.write.observes_memory:
        assert_same_step(design, {**given, "write_noise": 0})


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_narrower_than_the_belief(name, dtype):
    given = {key: x if key == "belief" else x.to(dtype) for key, x in arguments(FEW[name]).items()}
    assert_same_step(FEW[name], given)
    given["belief"] = given["belief"].map(lambda x: x.float())
    assert_same_step(FEW[name], given)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(name, value):
    """In every argument, belief included, at the first and the last entry, and also where it is multiplied by zero."""
    design = FEW[name]
    good = arguments(design, torch.float32)
    blank = {**good, **{key: torch.zeros_like(good[key]) for key in ("q", "k", "v")}}
    blank["belief"] = good["belief"].map(torch.zeros_like)
    for given in (good, blank):
        for argument, x in {**given, **given["belief"]._asdict()}.items():
            if argument == "belief" or x is None:
                continue
            for place in (0, -1):
                spoilt = x.clone()
                spoilt.view(-1)[place] = value
                if argument in Belief._fields:
                    bad = {**given, "belief": given["belief"]._replace(**{argument: spoilt})}
                else:
                    bad = {**given, argument: spoilt}
                assert f"{argument}: expected finite values, got {value}" in assert_same_refusal(design, bad)


@pytest.mark.parametrize("name", FEW)
def test_values_out_of_bounds_are_refused(name):
    design, given = FEW[name], arguments(FEW[name])
    outside = {"> 0": [0.0, -1.0], ">= 0": [-1.0], "<= 0": [1e-3]}
    for parameter in design.step_parameters:
        for value in outside.get(parameter.bound, []):
            spoilt = given[parameter.name].clone()
            spoilt.view(-1)[-1] = value
            for bad in (value, spoilt):
                message = assert_same_refusal(design, {**given, parameter.name: bad})
                assert message.startswith(f"{parameter.name}: expected ")


def test_a_negative_variance_is_refused():
    design, given = DESIGNS["diagonal-scalar"], arguments(DESIGNS["diagonal-scalar"])
    given["belief"].covariance.view(-1)[-1] = -1e-6
    assert "belief.covariance: expected variances of at least 0" in assert_same_refusal(design, given)


DENSE, RESET = DESIGNS["dense-identity"], catalogue["deltanet"]


@pytest.mark.parametrize(
    ("what", "design", "change"),
    [
        ("a covariance for a design that keeps none", RESET, {"covariance": torch.tensor(1.0)}),
        ("a number for a covariance", DENSE, {"covariance": 1.0}),
        ("a covariance in half precision", DENSE, {"covariance": torch.eye(4).expand(2, 2, 1, 4, 4).bfloat16()}),
        ("a number for a query", DENSE, {"q": 1.0}),
        ("values of another type", DENSE, {"v": torch.ones(2, 2, 4, dtype=torch.float32)}),
        ("one key for all heads", DENSE, {"k": torch.ones(4, dtype=torch.float64)}),
        ("no write noise", DENSE, {"write_noise": None}),
        ("a truth value", DENSE, {"write_noise": True}),
        ("an integer tensor", DENSE, {"write_noise": torch.tensor(1)}),
        ("a parameter too many", DENSE, {"log_decay": "-0.1"}),
        ("a parameter elsewhere", DENSE, {"log_decay": torch.tensor(-0.1, device="meta")}),
    ],
)
def test_what_does_not_fit_is_refused(what, design, change):
    given = arguments(design)
    if "covariance" in change:
        given["belief"] = given["belief"]._replace(**change)
    else:
        given.update(change)
    assert_same_refusal(design, given)


def test_a_wider_parameter_widens_the_belief():
    given = arguments(DENSE, torch.float32)
    given["write_noise"] = given["write_noise"].double()
    output, belief = mbd.filter_step(DENSE, **given)
    assert native(DENSE, **given) is None
    assert output.dtype == torch.float32
    assert belief.mean.dtype == torch.float64


def test_a_lost_covariance_is_named():
    given = arguments(DESIGNS["dense_2_groups-identity"])
    k = given["k"][1, 0]
    along = 100 * (k[:, None] * k[None, :] - (k * k).diag())  # negative along a direction, with a diagonal of zeros
    sign = 1 if k @ along @ k < 0 else -1
    given["belief"].covariance[1, 0, 1] += sign * along
    message = assert_same_refusal(DESIGNS["dense_2_groups-identity"], given)
    assert "stopped being positive definite in torch.float64 at batch 1, position 0, head 0, group 1" in message


def test_a_negative_variance_is_named():
    given = arguments(DESIGNS["dense_2_groups-identity"])
    given["belief"].covariance[1, 0, 1] -= 100 * torch.eye(4)
    message = assert_same_refusal(DESIGNS["dense_2_groups-identity"], given)
    assert "belief.covariance: expected variances of at least 0, got -99" in message


@pytest.mark.parametrize(
    ("name", "argument", "scale", "message"),
    [
        (
            "dense-scalar",
            "k",
            1e20,
            "the innovation precision overflowed in torch.float32 at batch 0, position 0",
        ),
        ("reset-scalar", "k", 1e20, "the innovation precision overflowed"),
        ("dense-scalar", "v", 1e38, "output overflowed in torch.float32"),
        ("additive_dense-scalar", "k", 1e20, "belief.covariance overflowed"),
        ("dense-scalar", "process_noise", 1e39, "process_noise: expected finite values"),
    ],
)
def test_overflow_is_named(name, argument, scale, message):
    given = arguments(DESIGNS[name], torch.float32)
    given["q"] = given["q"] * (1e-20 if "covariance" in message else 1e5)
    given[argument] = given[argument] * scale
    assert message in assert_same_refusal(DESIGNS[name], given)


def test_overflow_of_the_output_type_is_named():
    x = torch.full((1, 1, 4), 100.0, dtype=torch.float16)
    given = {"belief": Belief(torch.zeros(1, 1, 4, 4)), "q": x, "k": x, "v": x, "prior_variance": 1.0, "write_noise": 0}
    assert "output overflowed in torch.float16" in assert_same_refusal(catalogue["linear_attention"], given)


@pytest.mark.parametrize("argument", ["q", "k", "v", "log_decay", "write_noise", "belief"])
def test_gradients_take_the_long_way(argument):
    for design in (DESIGNS["dense-scalar"], catalogue["gated_deltanet"]):
        given = arguments(design)
        if argument == "belief":
            leaf = given["belief"].mean.requires_grad_()
        else:
            leaf = given[argument] = given[argument].clone().requires_grad_()
        output, belief = mbd.filter_step(design, **given)
        assert torch.autograd.grad(output.sum() + belief.mean.sum(), leaf)[0].isfinite().all()
        with torch.no_grad():
            assert native(design, **given) is not None


def test_transforms_of_torch_func_take_the_long_way():
    """The output is linear in q: its derivatives are reads of the new mean."""
    design = catalogue["gated_deltanet"]
    given = arguments(design)
    q = given.pop("q")
    _, belief = mbd.filter_step(design, q=q, **given)
    derivative = torch.func.jvp(lambda q: mbd.filter_step(design, q=q, **given)[0], (q,), (torch.ones_like(q),))[1]
    torch.testing.assert_close(derivative, belief.read(torch.ones_like(q)))
    gradient = torch.func.grad(lambda q: mbd.filter_step(design, q=q, **given)[0].sum())(q)
    torch.testing.assert_close(gradient, belief.mean.sum(-1))


@pytest.mark.parametrize("name", ["dense-scalar", "reset-scalar"])
def test_compiled_and_on_the_meta_device(name):
    design, given = DESIGNS[name], arguments(DESIGNS[name])
    expected, _ = mbd.filter_step(design, **given)
    compiled = torch.compile(lambda given: mbd.filter_step(design, **given)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(given), expected, rtol=1e-12, atol=1e-12)
    nowhere = {key: x.map(lambda y: y.to("meta")) if key == "belief" else x.to("meta") for key, x in given.items()}
    assert mbd.filter_step(design, **nowhere)[0].shape == expected.shape
