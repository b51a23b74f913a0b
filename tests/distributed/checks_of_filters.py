"""What two processes check of filters of DTensors; `test_sharded.py` runs it."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

import membydesign as mbd
from membydesign.layers import MemoryLayer
from membydesign.state import map_state, named_tensors
from problems import DESIGNS, random_problem

MESH = init_device_mesh("cpu", (2,))
NAMES = (
    "dense-scalar",
    "dense_2_groups-rotation",
    "diagonal-diagonal",
    "per_column_reset-scalar",
    "additive_dense-scalar",
)


def compared(name: str, placement: Shard | Replicate, **sizes: Any) -> None:
    """Outputs, beliefs, variances, evidence and gradients of DTensors are those of plain tensors."""
    problem = random_problem(DESIGNS[name], T=9, **sizes)
    requests = {"return_variance": problem.design.has_variance, "return_evidence": True}
    initial = random_problem(DESIGNS[name], T=3, seed=1, **sizes).filter().belief
    of_state = Shard(1) if placement == Shard(2) else placement

    def run(p: Any, state: Any) -> tuple[dict[str, Any], list[Any]]:
        leaves = [p.q, p.k, p.v, *p.parameters.values(), *(x for _, x in named_tensors(state))]
        for x in leaves:
            x.requires_grad_()
        out = p.filter(initial=state, **requests)
        y, after = p.step(out.belief, 0)
        results = {"y": y, **dict(named_tensors(out)), **dict(named_tensors(after, "after"))}
        losses = [x.square().sum() for x in results.values()]
        return results, [*torch.autograd.grad(sum(losses[1:], losses[0]), leaves)]

    expected, gradients = run(problem, initial)
    whole = problem.map(lambda x: distribute_tensor(x.detach(), MESH, [placement]))
    results, own = run(whole, map_state(lambda x: distribute_tensor(x.detach(), MESH, [of_state]), initial))
    assert results.keys() == expected.keys()
    for key, x in results.items():
        assert isinstance(x, DTensor), key
        over_heads = key in ("y", "log_evidence") or key.startswith(("belief", "after"))
        assert x.placements == ((of_state if over_heads else placement),), key
        assert x.shape == expected[key].shape, key
        assert torch.allclose(x.full_tensor(), expected[key], atol=1e-10), key
    for x, y in zip(own, gradients, strict=True):
        assert torch.allclose(x.full_tensor(), y, atol=1e-9)


def check_batch() -> None:
    for name in NAMES:
        compared(name, Shard(0), B=4, H=3)


def check_heads() -> None:
    for name in NAMES:
        compared(name, Shard(2), B=3, H=4)


def check_replicated() -> None:
    compared("dense-scalar", Replicate())


def check_uneven_and_empty_shards() -> None:
    for name in NAMES:
        compared(name, Shard(0), B=3)
        compared(name, Shard(0), B=1)
        compared(name, Shard(2), H=1)


def check_packed_sequences() -> None:
    problem = random_problem(DESIGNS["dense-scalar"], B=1, T=9, H=2)
    bounds = torch.tensor([0, 4, 9])
    heads, batch = (problem.map(lambda x, s=s: distribute_tensor(x, MESH, [s])) for s in (Shard(2), Shard(0)))
    expected, result = problem.filter(cu_seqlens=bounds), heads.filter(cu_seqlens=bounds)
    output: Any = result.output
    assert torch.allclose(output.full_tensor(), expected.output)
    assert torch.allclose(result.belief.mean.full_tensor(), expected.belief.mean)
    with pytest.raises(ValueError, match="cu_seqlens: expected q replicated or sharded over heads"):
        batch.filter(cu_seqlens=bounds)


def check_mixed_placements() -> None:
    """Replicated arguments are cut, pending sums completed; a learned number gets the gradient of all shards."""
    p = random_problem(DESIGNS["dense-scalar"], H=4)
    noise: Any = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    parameters = {**p.parameters, "write_noise": noise}
    expected = mbd.filter_sequence(p.design, p.q, p.k, p.v, **parameters).output
    expected.square().sum().backward()
    q = distribute_tensor(p.q, MESH, [Shard(2)])
    k = distribute_tensor(p.k, MESH, [Replicate()])
    v = DTensor.from_local(p.v / 2, MESH, [Partial()])
    shared: Any = distribute_tensor(noise.detach(), MESH, [Replicate()]).requires_grad_()
    whole = {name: distribute_tensor(x, MESH, [Replicate()]) for name, x in p.parameters.items()}
    changed: dict[str, Any] = {**whole, "write_noise": shared, "process_noise": 0.2}
    result: Any = mbd.filter_sequence(p.design, q, k, v, **changed).output
    again = mbd.filter_sequence(p.design, p.q, p.k, p.v, **{**parameters, "process_noise": 0.2}).output
    assert result.placements == (Shard(2),)
    assert torch.allclose(result.full_tensor(), again)
    noise.grad = None
    again.square().sum().backward()
    result.square().sum().backward()
    assert torch.allclose(shared.grad.full_tensor(), noise.grad)  # pyright: ignore


def check_refusals() -> None:
    p = random_problem(DESIGNS["dense-scalar"], T=8, H=4)
    whole = p.map(lambda x: distribute_tensor(x, MESH, [Shard(2)]))

    def filtered(**changed: Any) -> None:
        arguments = {"q": whole.q, "k": whole.k, "v": whole.v, **whole.parameters, **changed}
        mbd.filter_sequence(p.design, **arguments)

    for name, placement, match in (
        ("q", Shard(1), r"q: expected a DTensor that is replicated, or sharded over batch \(Shard\(0\)\) or heads"),
        ("k", Shard(3), r"k: expected a DTensor that is replicated, .* got placements \(Shard\(dim=3\),\)"),
        ("k", Shard(0), "k: expected placements that go with those of q, got placements"),
    ):
        changed = distribute_tensor(getattr(p, name), MESH, [placement])
        with pytest.raises(ValueError, match=match):
            filtered(**{name: changed})
    with pytest.raises(ValueError, match="write_noise: expected a DTensor, as other arguments are .* got a plain one"):
        filtered(write_noise=p.parameters["write_noise"])
    with pytest.raises(ValueError, match=r"write_noise: expected variances > 0, got -1 .* \(in the shard of rank \d"):
        filtered(write_noise=-1.0)


def check_layer() -> None:
    """A layer of replicated weights takes a batch that is sharded, also to decode."""
    torch.manual_seed(0)
    plain = MemoryLayer("bayesian_layer", 16, 2, 8, short_convolution=3)
    torch.manual_seed(0)
    layer = distribute_module(MemoryLayer("bayesian_layer", 16, 2, 8, short_convolution=3), MESH)
    x = torch.randn(4, 6, 16)
    expected, belief = plain(x)
    y, after = layer(distribute_tensor(x, MESH, [Shard(0)]))
    assert y.placements == (Shard(0),)
    assert torch.allclose(y.full_tensor(), expected, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    pairs: Any = zip(plain.named_parameters(), layer.parameters(), strict=True)
    for (name, a), b in pairs:
        assert torch.allclose(a.grad, b.grad.full_tensor(), atol=1e-4), name
    with torch.no_grad():
        step = torch.randn(4, 1, 16)
        expected, _ = plain(step, belief.detach())
        y, _ = layer(distribute_tensor(step, MESH, [Shard(0)]), after.detach())
    assert torch.allclose(y.full_tensor(), expected, atol=1e-5)
