"""Tensors without memory of their own are handled as torch handles them or refused by name; native code reads none."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import membydesign as mbd
from membydesign.filter.native import structs
from problems import DESIGNS, Problem, random_problem

neg_view, zeros_without_memory = (getattr(torch, name) for name in ("_neg_view", "_efficientzerotensor"))

NAMES = ("dense-scalar", "diagonal-scalar", "reset-scalar", "additive_dense-rotation")


class Named(torch.Tensor):
    """A subclass that only carries a name."""

    name = "mine"


def problem_of(name: str, **sizes: int) -> Problem:
    return random_problem(DESIGNS[name], dtype=torch.float32, **sizes)


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def freed_view(x: torch.Tensor) -> torch.Tensor:
    base = torch.cat((x, x))
    view = base[len(x) :]
    base.untyped_storage().resize_(0)
    return view


def shrunk(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(x.element_size())
    return x


@pytest.mark.parametrize("name", NAMES)
def test_negated_views_are_read_with_their_sign(name):
    problem = problem_of(name)
    negated = Problem(problem.design, neg_view(-problem.q), problem.k, problem.v, problem.parameters)
    assert torch.equal(negated.filter().output, problem.filter().output)
    belief = problem.filter(return_evidence=True).belief
    turned = belief.map(lambda x: neg_view(-x))
    assert torch.equal(problem.filter(initial=turned).output, problem.filter(initial=belief).output)
    assert torch.allclose(negated.step(turned, 0)[0], problem.step(belief, 0)[0], atol=1e-6)


def test_so_is_the_imaginary_part_of_a_conjugate():
    z = torch.tensor([0.3 + 0.7j])
    q = z.conj().imag.reshape(1, 1, 1, 1)
    assert q.is_neg()
    design, one = DESIGNS["dense-identity"], torch.ones(1, 1, 1, 1)
    run = [mbd.filter_sequence(design, x, one, one, process_noise=0.1, write_noise=0.1) for x in (q, q.clone())]
    assert torch.equal(run[0].output, run[1].output)


def test_gradients_that_are_negated_views_keep_their_sign():
    problem = problem_of("dense-scalar").map(lambda x: x.requires_grad_())
    output, upstream = problem.filter().output, torch.randn(problem.v.shape)
    (plain,) = torch.autograd.grad(output, problem.k, upstream, retain_graph=True)
    (negated,) = torch.autograd.grad(output, problem.k, neg_view(-upstream))
    assert torch.equal(plain, negated)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_without_memory_are_zeros(name):
    problem = problem_of(name)
    zeros, plain = (replace(problem, v=zero(problem.v.shape)) for zero in (zeros_without_memory, torch.zeros))
    assert torch.equal(zeros.filter().output, plain.filter().output)
    belief = problem.filter().belief
    assert torch.allclose(zeros.step(belief, 0)[0], plain.step(belief, 0)[0], atol=1e-6)


@pytest.mark.parametrize("lose", [freed, freed_view, shrunk])
@pytest.mark.parametrize("argument", ["q", "write_noise", "belief"])
def test_freed_storage_is_refused_by_name(lose, argument):
    problem = problem_of("dense-scalar")
    initial = problem.filter().belief
    expected = "{}: expected a tensor with memory, got one of shape .* whose storage holds too little"
    arguments: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters}
    if argument == "belief":
        initial = initial.map(lose)
    now = {name: x[:, 0] for name, x in arguments.items()}
    for some in (arguments, now):
        some.update({name: lose(x) for name, x in some.items() if name == argument})
    with pytest.raises(ValueError, match=expected.format(argument.replace("belief", "initial.mean"))):
        mbd.filter_sequence(problem.design, **arguments, initial=initial)
    if lose is not shrunk:  # a decoding step trusts that storage is there or not
        with pytest.raises(ValueError, match=expected.format(argument.replace("belief", "belief.mean"))):
            mbd.filter_step(problem.design, initial, **now)


def test_sparse_tensors_are_refused_by_name():
    problem = problem_of("dense-scalar")
    belief = problem.filter().belief
    with pytest.raises(ValueError, match=r"q: expected a dense tensor .* got one of layout torch.sparse_coo"):
        Problem(problem.design, problem.q.to_sparse(), problem.k, problem.v, problem.parameters).filter()
    now = {name: x[:, 0] for name, x in problem.parameters.items()}
    with pytest.raises(ValueError, match=r"q: expected a dense tensor .* got one of layout torch._mkldnn"):
        mbd.filter_step(problem.design, belief, problem.q[:, 0].to_mkldnn(), problem.k[:, 0], problem.v[:, 0], **now)


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_that_carries_a_name_is_filtered_as_any_tensor(name):
    problem = problem_of(name)
    subclassed = problem.map(lambda x: x.as_subclass(Named))
    result, plain = subclassed.filter(backend="native"), problem.filter(backend="native")
    assert torch.equal(result.output.as_subclass(torch.Tensor), plain.output)
    assert torch.allclose(subclassed.step(plain.belief, 0)[0], problem.step(plain.belief, 0)[0], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_that_wraps_tensors_runs_in_torch(name):
    problem = problem_of(name)
    twice = problem.map(lambda x: TwoTensor(x, x.clone()))
    with pytest.raises(ValueError, match=r'backend: expected "auto" or "torch" with q of type TwoTensor.*got "native"'):
        twice.filter(backend="native")
    leaves = [twice.k.requires_grad_(), problem.k.requires_grad_()]
    results = [x.filter(backend=backend) for x, backend in ((twice, "auto"), (problem, "torch"))]
    assert isinstance(results[0].output, TwoTensor)
    for part in (results[0].output.a, results[0].output.b):
        assert torch.allclose(part, results[1].output, atol=1e-6)
    gradients: list[Any] = [
        torch.autograd.grad(r.output.square().sum(), x)[0] for r, x in zip(results, leaves, strict=True)
    ]
    assert torch.allclose(gradients[0].a, gradients[1], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_give_shapes(name):
    problem = problem_of(name)
    with FakeTensorMode() as mode:
        fake = problem.map(mode.from_tensor)
        result = fake.filter(return_evidence=True)
        y, belief = fake.step(result.belief, 0)
    real = problem.filter(return_evidence=True)
    assert result.output.shape == real.output.shape
    assert result.log_evidence is not None
    assert real.log_evidence is not None
    assert result.log_evidence.shape == real.log_evidence.shape
    assert (y.shape, belief.mean.shape) == (problem.v[:, 0].shape, real.belief.mean.shape)


def test_native_code_refuses_what_it_cannot_read():
    problem = problem_of("dense-scalar")
    struct = structs.Struct("kalman_token.c", torch.float32, "Gradients")
    good = dict.fromkeys(struct.fields, problem.q)
    for bad in (TwoTensor(problem.q, problem.q), neg_view(problem.q), freed(problem.q), freed_view(problem.q)):
        with pytest.raises(structs.LayoutError, match="field q: expected a .*tensor"):
            struct.fill({**good, "q": bad})
