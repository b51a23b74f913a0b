"""Filters under torch.func, forward-mode derivatives and double backward: the numbers of the loop, or a named error."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import membydesign as mbd
from membydesign import Belief
from problems import DESIGNS, random_belief, random_problem, removal_rule

NAMES = [
    "dense-identity",
    "dense_2_groups-rotation",
    "dense-rotation_real",
    "diagonal_2_groups-rotation",
    "reset-scalar",
    "per_column_reset-diagonal",
    "additive-diagonal",
    "additive_dense-rotation",
]
WAYS = [{}, {"backend": "native"}, {"backend": "torch"}, {"method": "recurrent"}]
TORCH = [{}, {"backend": "torch"}, {"method": "recurrent"}]


def tensors_of(name: str, **sizes: Any) -> list[Tensor]:
    problem = random_problem(DESIGNS[name], **sizes)
    return [problem.q, problem.k, problem.v, *problem.parameters.values()]


def loss(name: str, *tensors: Any, **way) -> Tensor:
    """A number that everything which a filter returns has a part in."""
    design, (q, k, v, *rest) = DESIGNS[name], tensors
    parameters = dict(zip((p.name for p in design.step_parameters), rest, strict=True))
    out = mbd.filter_sequence(
        design, q, k, v, **parameters, return_evidence=True, return_variance=design.has_variance, **way
    )
    assert out.log_evidence is not None
    total = out.output.square().sum() + out.belief.mean.sin().sum() + out.log_evidence.sum()
    total = total if out.variance is None else total + out.variance.sum()
    return total if out.belief.covariance is None else total + out.belief.covariance.square().sum()


def expected_gradients(name: str, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(name, *leaves, method="recurrent"), leaves)


def assert_all_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_torch_func(name, way):
    tensors = tensors_of(name, T=19)
    places = tuple(range(len(tensors)))
    expected = expected_gradients(name, tensors)
    assert_all_close(grad(lambda *x: loss(name, *x, **way), argnums=places)(*tensors), expected)
    value, pull, *_ = vjp(lambda *x: loss(name, *x, **way), *tensors)
    assert_all_close(pull(torch.ones_like(value)), expected)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_vmap_of_gradients_and_gradients_of_vmap(name, way):
    """Each sample of a batch by itself, in either order; the mapped axis lies at the end."""
    tensors = tensors_of(name, T=19)
    places = tuple(range(len(tensors)))
    expected = expected_gradients(name, tensors)

    def of_sample(*x: Any) -> Tensor:
        return loss(name, *(part[None] for part in x), **way)

    ends = [x.movedim(0, -1) for x in tensors]
    assert_all_close(vmap(grad(of_sample, argnums=places), in_dims=-1)(*ends), expected)
    assert_all_close(grad(lambda *x: vmap(of_sample)(*x).sum(), argnums=places)(*tensors), expected)


@pytest.mark.parametrize("name", ["dense-identity", "diagonal_2_groups-rotation", "reset-scalar"])
def test_what_is_not_mapped_is_shared(name):
    """Queries for each sample, all else shared by them, also by two maps in one another."""
    q, *rest = tensors_of(name, T=9)
    queries = torch.stack([q, 2 * q, -q, q.flip(1)]).unflatten(0, (2, 2))
    found = vmap(vmap(lambda q: loss(name, q, *rest)))(queries)
    expected = torch.stack([loss(name, one, *rest, method="recurrent") for one in queries.flatten(0, 1)])
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("way", TORCH, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_derivatives(name, way):
    tensors = tensors_of(name, T=19)
    generator = torch.Generator().manual_seed(3)
    tangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors]
    pairs = zip(expected_gradients(name, tensors), tangents, strict=True)
    expected = torch.stack([(g * t).sum() for g, t in pairs]).sum()
    tangent = jvp(lambda *x: loss(name, *x, **way), tuple(tensors), tuple(tangents))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-7, atol=1e-8)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
        found = forward_ad.unpack_dual(loss(name, *duals, **way)).tangent
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("way", TORCH, ids=str)
@pytest.mark.parametrize("name", ["dense-rotation_real", "diagonal-scalar", "reset-diagonal", "additive_dense-scalar"])
def test_hessians(name, way):
    """Forward over reverse, and reverse over reverse, which by default leaves native code."""
    q, k, *rest = tensors_of(name, B=1, T=3, H=1)

    def of_key(k: Tensor) -> Tensor:
        return loss(name, q, k, *rest, **way)

    expected = torch.autograd.functional.hessian(lambda k: loss(name, q, k, *rest, method="recurrent"), k)
    assert_all_close([hessian(of_key)(k), jacrev(jacrev(of_key))(k)], [expected, expected])


@pytest.mark.parametrize("way", [{"backend": "torch", "chunk_size": 2}, {"method": "recurrent"}], ids=str)
@pytest.mark.parametrize("name", ["dense-rotation_real", "dense_2_groups-scalar", "reset-scalar"])
def test_second_derivatives_against_differences(name, way):
    tensors = [x.requires_grad_() for x in tensors_of(name, B=1, T=3, H=1, D=2, M=2)]
    assert torch.autograd.gradgradcheck(lambda *x: loss(name, *x, **way), tensors, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["dense-identity", "diagonal-identity", "reset-scalar"])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_native_code_refuses_second_derivatives(name, backend):
    """Also if what follows the filter is linear: a part of the answer, here that of k³, would be wrong."""
    q, k, *rest = tensors_of(name, T=5)
    k.requires_grad_()
    total = loss(name, q, k, *rest, backend=backend) + k.pow(3).sum()
    (gradient,) = torch.autograd.grad(total, k, create_graph=True)
    assert_all_close([gradient], [expected_gradients(name, [q, k.detach(), *rest])[1] + 3 * k.square()])
    with pytest.raises(RuntimeError, match='can be differentiated once.*use backend="torch"'):
        torch.autograd.grad(gradient.sum(), k)


def test_native_code_refuses_a_part_of_the_answer():
    """The output's sum has a constant gradient, which says nothing of the filter's own second derivative."""
    problem = random_problem(DESIGNS["dense-identity"], T=5)
    k = problem.k.requires_grad_()
    total = problem.filter().output.sum() + k.pow(3).sum()
    (gradient,) = torch.autograd.grad(total, k, create_graph=True)
    with pytest.raises(RuntimeError, match='can be differentiated once.*use backend="torch"'):
        torch.autograd.grad(gradient.sum(), k)


def test_native_code_refuses_tangents_that_it_is_named_for():
    tensors = tensors_of("dense-identity")
    tangents = tuple(torch.ones_like(x) for x in tensors)
    with pytest.raises(RuntimeError, match='no forward-mode derivative.*use backend="torch"'):
        jvp(lambda *x: loss("dense-identity", *x, backend="native"), tuple(tensors), tangents)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["dense-rotation", "diagonal-scalar", "reset-scalar"])
def test_batched_gradients(name, backend):
    """Many pullbacks at once, as torch.autograd.functional.jacobian(vectorize=True) takes them, by an older vmap."""
    problem = random_problem(DESIGNS[name], B=1, T=3, H=1)
    leaves = [problem.k.requires_grad_(), problem.v.requires_grad_()]
    output = problem.filter(backend=backend).output
    seeds = torch.randn(4, *output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(0))
    if backend == "native":
        with pytest.raises(RuntimeError, match='^is_grads_batched: expected False .*use backend="torch"'):
            torch.autograd.grad(output, leaves, seeds, is_grads_batched=True)
        return
    found = torch.autograd.grad(output, leaves, seeds, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(output, leaves, seed, retain_graph=True) for seed in seeds]
    assert_all_close(found, [torch.stack(parts) for parts in zip(*each, strict=True)])


def test_bad_values_are_found_inside_vmap():
    problem = random_problem(DESIGNS["dense-identity"], B=3)
    spoiled = problem.k.clone()
    spoiled[2, 4, 1, 0] = float("nan")
    noise = problem.parameters["write_noise"].clone()
    noise[1, 3, 0] = -1.0

    def run(k: Tensor, write_noise: Tensor) -> Tensor:
        k, write_noise = k[None], write_noise[None]
        return mbd.filter_sequence(problem.design, k, k, k, process_noise=0.1, write_noise=write_noise).output

    good = problem.parameters["write_noise"]
    with pytest.raises(ValueError, match="^q: .*got nan at batch 0, position 4, head 1, entry 0, sample 2 of torch.vm"):
        vmap(run)(spoiled, good)
    with pytest.raises(ValueError, match=r"^write_noise: .*got -1 at batch 0, position 3, head 0.*, sample 1 of torch"):
        vmap(run)(problem.k, noise)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_lost_covariance_is_reported_or_not_lost_inside_vmap(backend):
    """Near-duplicate keys, r² = 1e-9, float32: native code raises, and the torch form goes on in float64."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(2, 1, 1, 16, generator=generator), dim=-1)
    k = k + 1e-4 * torch.randn(2, 200, 1, 16, generator=generator)
    k[0] = torch.eye(16).repeat(13, 1)[:200, None]  # a sample that is easy
    design = DESIGNS["dense-identity"]
    noises = {"process_noise": 0.0, "write_noise": 1e-9}

    def run(k: Tensor) -> Tensor:
        return mbd.filter_sequence(design, *[k[None]] * 3, **noises, backend=backend).output[0]

    if backend == "auto":
        with pytest.raises(mbd.NotPositiveDefiniteError, match=r"position \d+, head 0, group 0, sample 1 of"):
            vmap(run)(k)
        return
    exact = mbd.filter_sequence(design, *[k.double()] * 3, **noises, method="recurrent").output
    torch.testing.assert_close(vmap(run)(k), exact.float())


def test_bad_beliefs_are_found_inside_vmap():
    design = DESIGNS["dense-identity"]
    problem, belief = random_problem(design, B=1), random_belief(design, B=1)
    assert belief.covariance is not None

    def run(sign: Tensor) -> Tensor:
        assert belief.covariance is not None
        return problem.filter(initial=Belief(belief.mean, sign * belief.covariance)).output

    with pytest.raises(mbd.NotPositiveDefiniteError, match="group 0, before position 0, sample 1 of torch.vmap"):
        vmap(run)(torch.tensor([1.0, -1.0], dtype=torch.float64))


def test_packed_sequences_under_vmap():
    name = "dense-scalar"
    problem = random_problem(DESIGNS[name], B=1, T=9)
    bounds = torch.tensor([0, 4, 9])

    def run(q: Tensor, bounds: Tensor) -> Tensor:
        return replace(problem, q=q).filter(cu_seqlens=bounds).output

    queries = torch.stack([problem.q, -2 * problem.q])
    found = vmap(run, in_dims=(0, None))(queries, bounds)
    torch.testing.assert_close(found, torch.stack([run(q, bounds) for q in queries]))
    with pytest.raises(ValueError, match="^cu_seqlens: expected boundaries that all samples of torch.vmap share"):
        vmap(run)(queries, torch.stack([bounds, bounds]))


@pytest.mark.parametrize("name", NAMES)
def test_steps_under_vmap(name):
    design = DESIGNS[name]
    problem, belief = random_problem(design, B=3), random_belief(design, B=3)
    expected = problem.step(belief, 2)
    now = {key: x[:, 2] for key, x in problem.parameters.items()}

    def step(belief: Belief, q: Tensor, k: Tensor, v: Tensor, now: dict[str, Tensor]) -> tuple[Tensor, Belief]:
        one = {key: x[None] for key, x in now.items()}
        y, belief = mbd.filter_step(design, belief.map(lambda x: x[None]), q[None], k[None], v[None], **one)
        return y[0], belief.map(lambda x: x[0])

    covariance = None if belief.covariance is None else 0
    axes = type(belief)(0, covariance)  # pyright: ignore[reportArgumentType]
    steps = vmap(step, in_dims=(axes, 0, 0, 0, 0), out_dims=(0, axes))  # pyright: ignore[reportArgumentType]
    found = steps(belief, problem.q[:, 2], problem.k[:, 2], problem.v[:, 2], now)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1].mean, expected[1].mean)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_removal(way):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 7, 2, 4, dtype=torch.float64, generator=generator) / 2
    x[0] = -x[0].abs()

    def total(x: Tensor, **way) -> Tensor:
        y, memory = removal_rule(*x.unbind(), **way)
        return y.square().sum() + memory.sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf, method="recurrent"), leaf)
    each = vmap(grad(lambda x: total(x[:, None], **way)), in_dims=1, out_dims=1)(x)
    assert_all_close([grad(lambda x: total(x, **way))(x), each], [expected, expected])
    if way.get("backend") != "native":
        tangent = jvp(lambda x: total(x, **way), (x,), (x,))[1]
        torch.testing.assert_close(tangent, (expected * x).sum())
