"""A drift that removes what memory holds at a key (RWKV-7): the chunked kernels equal the loop over tokens."""

from dataclasses import replace

import pytest
import torch

from membydesign.testing import DesignContract, assert_close
from problems import REMOVAL, removal_rule

NAMES = ("log_decay", "removal_key", "removal", "k", "v", "q")


def problem(B=2, T=37, H=2, D=6, M=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kappa = torch.nn.functional.normalize(normal(B, T, H, D), dim=-1)
    log_decay = -0.6 * torch.rand(B, T, H, D, generator=generator, dtype=torch.float64)
    rate = torch.rand(B, T, H, D, generator=generator, dtype=torch.float64)
    parts = (log_decay, kappa, rate * kappa, normal(B, T, H, D), normal(B, T, H, M), normal(B, T, H, D))
    initial = normal(B, H, D, M)
    return [x.to(dtype).requires_grad_() for x in (*parts, initial)]


def run(inputs, **options):
    *tensors, initial = inputs
    return removal_rule(*tensors, initial=initial, **options)


def test_it_is_the_recurrence_of_the_paper():
    """M_t = diag(w_t) M_{t-1} − b_t (M_{t-1}ᵀ κ_t)ᵀ + k_t v_tᵀ, written out."""
    log_decay, key, removal, k, v, q, M = (x.detach() for x in problem(T=9))
    output, end = run([log_decay, key, removal, k, v, q, M], method="recurrent")
    for t in range(9):
        removed = torch.einsum("bhd,bhe,bhem->bhdm", removal[:, t], key[:, t], M)
        M = log_decay[:, t].exp()[..., None] * M - removed + torch.einsum("bhd,bhm->bhdm", k[:, t], v[:, t])
        assert_close(output[:, t], torch.einsum("bhd,bhdm->bhm", q[:, t], M), 1e-12)
    assert_close(end, M, 1e-12)


class TestContract(DesignContract):
    design = REMOVAL

    def prepare(self, problem):
        """A removal that shrinks memory: κ of length one, b = aκ with a rate in (0, 1)."""
        key = torch.nn.functional.normalize(problem.parameters["removal_key"], dim=-1)
        removal = problem.parameters["removal"].sigmoid() * key * 0.5
        return replace(problem, parameters={**problem.parameters, "removal_key": key, "removal": removal})


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("chunk_size", [None, 1, 5, 64])
@pytest.mark.parametrize("sizes", [{}, {"D": 24, "M": 40}, {"T": 2, "D": 1, "M": 1}])
def test_chunks_are_the_loop(backend, chunk_size, sizes):
    """Outputs, memory and every gradient."""
    inputs = problem(**sizes)
    wanted = run(inputs, method="recurrent")
    found = run(inputs, backend=backend, chunk_size=chunk_size)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in wanted]

    def gradients(results):
        return torch.autograd.grad((results[0] * weights[0]).sum() + (results[1] * weights[1]).sum(), inputs)

    for a, b, name in zip(found, wanted, ("output", "memory"), strict=True):
        assert_close(a, b, 1e-10, name)
    for a, b, name in zip(gradients(found), gradients(wanted), (*NAMES, "initial"), strict=True):
        assert_close(a, b, 1e-9, name)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_float32_over_a_long_sequence(backend):
    wide = problem(B=1, T=4096, D=16, M=16)
    with torch.no_grad():
        wanted, memory = run(wide, method="recurrent")
        found, end = run([x.float() for x in wide], backend=backend)
    scale = wanted.abs().max().item()
    assert_close(found.double() / scale, wanted / scale, 1e-5)
    assert_close(end.double() / scale, memory / scale, 1e-5)


def test_half_precision_keeps_a_float32_memory():
    *inputs, initial = problem(dtype=torch.bfloat16)
    output, memory = run([*inputs, initial.float()])
    assert (output.dtype, memory.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("method", ["chunk", "recurrent"])
def test_packed_is_separate(method):
    *parts, _ = problem(B=1, T=30)
    bounds = [0, 11, 12, 14, 14, 24, 30]
    start = torch.randn(6, 2, 6, 5, dtype=torch.float64)
    output, memory = removal_rule(*parts, initial=start, cu_seqlens=torch.tensor(bounds), method=method)
    assert_close(memory[3], start[3], 0.0)  # of an empty sequence
    for n in (0, 1, 2, 4, 5):
        own = [x[:, bounds[n] : bounds[n + 1]] for x in parts]
        y, end = removal_rule(*own, initial=start[n : n + 1])
        assert_close(output[:, bounds[n] : bounds[n + 1]], y, 1e-10)
        assert_close(memory[n : n + 1], end, 1e-10)


def test_bad_arguments_are_refused():
    log_decay, removal_key, removal, k, v, q, initial = problem()
    with pytest.raises(
        ValueError, match=r"^removal: expected .* \[B,T,H,D\] = \[2, 37, 2, 6\], got shape \[2, 37, 2, 5"
    ):
        removal_rule(log_decay, removal_key, removal[..., :5], k, v, q)
    with pytest.raises(ValueError, match=r"^v: expected shape \[2, 37, 2, M\] to go with q, got shape \[2, 36, 2, 5\]"):
        removal_rule(log_decay, removal_key, removal, k, v[:, :-1], q)
    with pytest.raises(ValueError, match=r"^initial.mean: expected shape \[2, 2, 6, 5\] .*, got shape \[1, 2, 6, 5\]"):
        removal_rule(log_decay, removal_key, removal, k, v, q, initial=initial[:1])
    for name, wrong in {"method": "scan", "backend": "gpu", "chunk_size": 0}.items():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            run(problem(), **{name: wrong})


def test_decays_out_of_bounds_never_give_nan():
    """Chunks would form 1/w, so such decays go through the loop."""
    q, k, v, key, removal = torch.randn(5, 1, 6, 2, 4).unbind()
    strong = torch.full_like(q, -100.0)
    with pytest.raises(ValueError, match="^backend: .*for log-decays below -60.0, since 1/w is formed"):
        removal_rule(strong, key, removal, k, v, q, backend="native")
    expected, M = removal_rule(strong, key, removal, k, v, q, method="recurrent")
    assert torch.isfinite(M).all()
    assert torch.equal(removal_rule(strong, key, removal, k, v, q)[0], expected)
    y, _ = removal_rule(strong.clamp(min=-60), key, removal, k, v, q)
    assert torch.isfinite(y).all()
    with pytest.raises(ValueError, match="^log_decay: expected log-decays <= 0, .*, got 100"):
        removal_rule(-strong, key, removal, k, v, q)
