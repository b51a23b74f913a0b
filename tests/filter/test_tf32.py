"""Products of filters are float32's, whatever torch may do with other products.

There is no GPU here. TF32 is emulated: whenever torch's setting allows less than float32 at the time of a call, the
factors of a product are rounded to 10 bits of mantissa.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from membydesign import products
from membydesign.filter import fla
from problems import DESIGNS, random_belief, random_problem, removal_rule

PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "addbmm"}
NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")
"""Since PyTorch 2.9 each library has a setting of its own, and follows a general one until it is set."""

GENERAL: Any = torch.backends
CUDA: Any = torch.backends.cuda.matmul
ONEDNN: Any = getattr(torch.backends.mkldnn, "matmul", None)


def allowed() -> bool:
    """Whether a product may be rounded now."""
    if NEW:
        return ONEDNN.fp32_precision not in ("ieee", "none")
    return torch.get_float32_matmul_precision() != "highest"


def rounded(x):
    """A float32 tensor with 10 bits of mantissa."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class TF32(TorchDispatchMode):
    """Rounds the factors of products, and counts how many."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS and any(x.dtype == torch.float32 for x in args):
            self.seen += 1
            if allowed():
                self.rounded += 1
                args = tree_map(rounded, args)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def high():
    """As many training scripts begin."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def everything(problem, design, **way):
    """All that a filter returns, and its gradients."""
    problem = problem.map(lambda x: x.detach().float().requires_grad_())
    sizes = {"B": 1, "H": 2, "D": 4, "M": 4}
    initial = random_belief(design, **sizes).map(lambda x: x.float().requires_grad_())
    out = problem.filter(initial=initial, return_variance=design.has_variance, return_evidence=True, **way)
    found = [x for x in (out.output, *out.belief, out.variance, out.write_log_evidence) if x is not None]
    leaves = [problem.q, problem.k, problem.v, *problem.parameters.values(), *(x for x in initial if x is not None)]
    loss = torch.stack([(x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found]).sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return found, [x for x in gradients if x is not None]


def assert_unmoved(run):
    """Outputs to the last bit; gradients but for the order of sums."""
    torch.set_float32_matmul_precision("highest")
    outputs, gradients = run()
    torch.set_float32_matmul_precision("high")
    with TF32() as mode:
        again, gradients_again = run()
    assert mode.seen > 0
    assert mode.rounded == 0
    for ours, theirs in zip(again, outputs, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(gradients_again, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("name", DESIGNS)
def test_the_chunk_form(name, high):
    problem = quiet(random_problem(DESIGNS[name], B=1, T=20, H=2, D=4, M=4))
    assert_unmoved(lambda: everything(problem, DESIGNS[name], backend="torch", chunk_size=8))


@pytest.mark.parametrize("name", [name for name in DESIGNS if name.endswith("-diagonal")])
def test_the_loop(name, high):
    problem = quiet(random_problem(DESIGNS[name], B=1, T=4, H=2, D=4, M=4))
    assert_unmoved(lambda: everything(problem, DESIGNS[name], method="recurrent"))


def quiet(problem):
    """Writes that are not much surer than memory, so that float32 is not left for float64."""
    if "write_noise" not in problem.parameters:
        return problem
    return replace(problem, parameters={**problem.parameters, "write_noise": 1 + problem.parameters["write_noise"]})


@pytest.mark.parametrize("name", ["dense-scalar", "dense_2_groups-diagonal"])
def test_the_torch_parts_around_the_kernels(name, high):
    pytest.importorskip("triton")
    problem = quiet(random_problem(DESIGNS[name], B=1, T=20, H=2, D=4, M=4))
    assert_unmoved(lambda: everything(problem, DESIGNS[name], backend="triton"))


@pytest.mark.parametrize("way", [{"backend": "torch", "chunk_size": 8}, {"method": "recurrent"}], ids=["torch", "loop"])
def test_removal(way, high):
    x = [0.5 * t.requires_grad_() for t in torch.randn(6, 1, 20, 2, 4, generator=torch.Generator().manual_seed(0))]

    def run():
        output, memory = removal_rule(-x[0].abs(), *x[1:], **way)
        gradients = torch.autograd.grad(output.sum() + memory.square().sum(), x)
        return [output, memory], list(gradients)

    assert_unmoved(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense-scalar", "reset-diagonal"])
def test_a_compiled_graph_has_no_product_that_rounds(name, high):
    """Forward and backward, with factors and triangular systems whose gradients torch would write as products."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    torch.compiler.reset()
    problem = quiet(random_problem(DESIGNS[name], B=1, T=12, H=1, D=4, M=4)).map(lambda x: x.float())
    k = problem.k.requires_grad_()
    graphs = []

    def look(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    def run(k):
        return replace(problem, k=k).filter(backend="torch", chunk_size=8).output

    compiled = torch.compile(run, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
    found, exact = (torch.autograd.grad(f(k).square().sum(), k)[0] for f in (compiled, run))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2, "one each way"
    for graph in graphs:
        assert not any(target.split(".")[1] in PRODUCTS for target in graph if target.startswith("aten.")), graph
        assert any("membydesign.product" in target for target in graph)

    graphs.clear()
    torch.set_float32_matmul_precision("highest")  # which compiles again, and plainly
    torch.testing.assert_close(compiled(k), run(k))
    assert any("aten.bmm" in target for target in graphs[0])


def allow_in_general():
    GENERAL.fp32_precision = "tf32"


def allow_new():
    CUDA.fp32_precision = "tf32"


def allow_old():
    CUDA.allow_tf32 = True


WAYS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": allow_old,
    "fp32_precision": allow_new,
    "all fp32_precision": allow_in_general,
}


def state():
    """All that can be read of the setting."""
    try:
        shared = torch.get_float32_matmul_precision()
    except RuntimeError:  # the old and the new way were mixed
        shared = None
    return shared, [library.fp32_precision for library in (GENERAL, CUDA, ONEDNN)] if NEW else []


@pytest.fixture
def untouched():
    yield
    if NEW:
        for library in (GENERAL, CUDA, ONEDNN):
            library.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_allow_it(way, untouched):
    """It is noticed, forbidden inside, and allowed again afterwards as it was."""
    if "fp32_precision" in way and not NEW:
        pytest.skip("since PyTorch 2.9")
    if NEW:  # as in a new process
        CUDA.fp32_precision = ONEDNN.fp32_precision = "none"
    assert not products.rounds("cuda")
    assert not fla.as_exact(torch.float32)
    WAYS[way]()
    before = state()
    assert products.rounds("cuda")
    assert not products.rounds("mps")

    def inside():
        with products.full_precision("cuda"):
            assert products.rounds("cuda"), "what the user allows is what counts for others"
            assert fla.as_exact(torch.float32)
            if NEW:
                assert CUDA.fp32_precision == ONEDNN.fp32_precision == "ieee"
            if before[0] is not None:
                assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert state() == before
    if way == "all fp32_precision":
        GENERAL.fp32_precision = "ieee"
        assert not products.rounds("cuda"), "what followed the general setting follows it still"


def test_nothing_is_set_where_nothing_rounds(monkeypatch):
    monkeypatch.setattr(products, "_tightened", None)
    x = torch.eye(3).requires_grad_()
    with products.full_precision("cuda"):
        assert type(products.product(x, x).grad_fn).__name__ == "MmBackward0"
    assert type(products.product(x, x).grad_fn).__name__ == "MmBackward0"


def test_threads_do_not_undo_each_other(high):
    """A thread that leaves while another is inside changes nothing; the last one puts back what was set."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with products.full_precision("cpu"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    assert not allowed()
    x = torch.eye(3).requires_grad_()
    assert type(products.product(x, x).grad_fn).__name__ == "_ProductBackward", "another thread's guard ends too early"
    with products.full_precision("cpu"):
        leave.set()
        thread.join()
        assert not allowed()
    assert allowed()


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (2, 3, 4, 5)), ((3, 4), (2, 4, 5))])
def test_product(shapes, high, monkeypatch):
    """Gradients, their gradients and torch.func, held against finite differences in float64."""
    monkeypatch.setattr(products, "_guarded", lambda x: not products._here.depth)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    assert torch.equal(products.product(a, b), a @ b)
    torch.autograd.gradcheck(products.product, (a, b), check_forward_ad=True)
    torch.autograd.gradgradcheck(products.product, (a, b))
    mapped = torch.func.vmap(products.product)(a.detach()[None], b.detach()[None])[0]
    torch.testing.assert_close(mapped, a @ b)


@pytest.mark.parametrize("unitriangular", [False, True])
def test_factors_and_triangular_systems(unitriangular, high, monkeypatch):
    monkeypatch.setattr(products, "_guarded", lambda x: not products._here.depth)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    lower = (a.tril() + 4 * torch.eye(4)).requires_grad_()

    def solve(lower, b):
        return products.solve_lower(lower, b, unitriangular=unitriangular)

    torch.autograd.gradcheck(solve, (lower, b.requires_grad_()), check_forward_ad=True)
    square = (a @ a.mT + torch.eye(4)).requires_grad_()
    torch.autograd.gradcheck(lambda x: products.cholesky((x + x.mT) / 2)[0], square)


@pytest.mark.parametrize("name", ["dense_2_groups-rotation", "reset-diagonal"])
def test_transforms_and_second_derivatives(name, high):
    """The same numbers as without the setting: forward mode, gradients of each sample, and Hessian products."""
    design = DESIGNS[name]
    problem = quiet(random_problem(design, B=1, T=10, H=2, D=4, M=4)).map(lambda x: x.detach().float())
    along = torch.linspace(-1, 1, problem.k.numel()).view(problem.k.shape)

    def loss(k):
        out = replace(problem, k=k).filter(backend="torch", chunk_size=4, return_evidence=True)
        assert out.write_log_evidence is not None
        return out.output.square().sum() + out.write_log_evidence.sum()

    def run():
        tangent = torch.func.jvp(loss, (problem.k,), (along,))[1]
        samples = torch.func.vmap(torch.func.grad(loss))(torch.stack((problem.k, 2 * problem.k)))
        k = problem.k.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(k), k, create_graph=True)
        (product,) = torch.autograd.grad((gradient * along).sum(), k)
        return [tangent, samples, product]

    torch.set_float32_matmul_precision("highest")
    expected = run()
    torch.set_float32_matmul_precision("high")
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
