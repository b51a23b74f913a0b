"""Kernels that cannot be used: an old Triton, one that cannot be imported, one whose compiler fails.

There is no GPU here, so `backend="auto"` is told that the kernels fit, and they run in Triton's interpreter until a
stand-in for a kernel fails in their place.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import membydesign as mbd
from problems import DESIGNS, random_belief, random_problem

pytest.importorskip("triton")
from kernel_checks.interpreter import faster
from membydesign.filter import api
from membydesign.filter.triton import dense as triton
from membydesign.filter.triton import kernel
from membydesign.filter.triton import step as triton_step
from membydesign.filter.triton import support as triton_support

faster()

KERNELS = {
    "forward": (triton, "forward_kernel"),
    "backward": (triton, "backward_kernel"),
    "step": (triton_step, "step_kernel"),
}


class CompilationError(Exception):
    """As Triton's own: the place first, the reason last."""


class FailingKernel:
    """Stands in for a kernel that does not compile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or CompilationError("at 26:8:\n    return tl.dot(left, right)\n\nexpected K >= 16")
        self.calls = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.calls += 1
        raise self.error


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """No failure is remembered, and `backend="auto"` takes the kernels."""
    monkeypatch.setattr(triton_support, "_failed", set())
    monkeypatch.setattr(triton_support, "_warned", set())
    monkeypatch.setattr(kernel, "fits", lambda _: True)
    monkeypatch.setattr(api, "native_step", lambda *_: None)


@pytest.fixture
def failing(monkeypatch):
    """Lets a kernel fail."""

    def fail(name, error=None):
        kernel = FailingKernel(error)
        monkeypatch.setattr(*KERNELS[name], kernel)
        return kernel

    return fail


def count(said):
    """Our warnings among those that were issued: Triton's interpreter has some of numpy's."""
    return sum(warning.category is mbd.KernelWarning for warning in said)


def problem_of(name, T=37):
    problem = random_problem(DESIGNS[name], B=1, T=T, H=1, D=4, M=4, dtype=torch.float32)
    quiet = {**problem.parameters, "write_noise": 1 + problem.parameters["write_noise"]}  # float32 is enough
    return replace(problem, parameters=quiet).map(lambda x: x.detach().requires_grad_())


def everything(problem, **way):
    """What a filter returns, and its gradients."""
    initial = random_belief(problem.design, B=1, H=1, D=4, M=4).map(lambda x: (0.3 * x).float().requires_grad_())
    out = problem.filter(initial=initial, return_variance=True, return_evidence=True, **way)
    found = [out.output, *out.belief, out.variance, out.write_log_evidence]
    leaves = [problem.q, problem.k, problem.v, *problem.parameters.values(), *initial]
    loss = torch.stack([(x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found]).sum()
    return [*found, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("name", ["dense-diagonal", "dense_2_groups-rotation_real"])
def test_auto_filters_through_torch_with_the_same_results(name, kernel, failing):
    problem = problem_of(name)
    expected = everything(problem)
    broken = failing(kernel)
    with pytest.warns(mbd.KernelWarning, match=rf"through torch .*Triton \d.* the {kernel} kernel: .*K >= 16") as said:
        found = everything(problem)
    assert count(said) == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mbd.KernelWarning)
        everything(problem)
    assert broken.calls == 1, "what does not compile is not compiled again"


def test_without_gradients(failing):
    problem = problem_of("dense-scalar")
    with torch.no_grad():
        expected = problem.filter()
        failing("forward")
        with pytest.warns(mbd.KernelWarning):
            found = problem.filter()
    torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.belief.covariance, expected.belief.covariance, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_a_backend_that_was_asked_for_raises(kernel, failing):
    problem = problem_of("dense-scalar")
    broken = failing(kernel)
    for _ in range(2):
        with pytest.raises(mbd.KernelError, match=rf"^Triton \d.* cannot run the {kernel} kernel: .*K >= 16") as caught:
            problem.filter(backend="triton").output.sum().backward()
        assert caught.value.__cause__ is broken.error


def test_the_decoding_step(failing):
    problem = random_problem(DESIGNS["dense-scalar"], T=2)
    belief = mbd.Belief.prior(problem.design, 2, 2, 4, 4, dtype=torch.float64)
    expected = problem.filter(method="recurrent").output
    broken = failing("step", FileNotFoundError("cannot find ptxas"))
    with pytest.warns(mbd.KernelWarning, match="the decoding kernel: FileNotFoundError: cannot find ptxas"):
        y, belief = problem.step(belief, 0)
    torch.testing.assert_close(y, expected[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", mbd.KernelWarning)
        y, belief = problem.step(belief, 1)
    torch.testing.assert_close(y, expected[:, 1])
    assert broken.calls == 1


def test_one_warning_for_each_cause(failing):
    problem = problem_of("dense-scalar", T=5)
    failing("forward", RuntimeError("0 active drivers ([]). There should only be one."))
    failing("backward", RuntimeError("0 active drivers ([]). There should only be one."))
    with pytest.warns(mbd.KernelWarning) as said:
        everything(problem)
    assert count(said) == 1
    failing("forward", RuntimeError("PassManager::run failed"))
    with pytest.warns(mbd.KernelWarning, match="PassManager"):
        everything(problem_of("dense-diagonal", T=5).map(lambda x: x.detach().double().requires_grad_()))


def test_the_warning_can_be_ignored_or_raised(failing):
    problem = problem_of("dense-scalar", T=5)
    failing("forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error", mbd.KernelWarning)
        for _ in range(2):
            with pytest.raises(mbd.KernelWarning):
                problem.filter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mbd.KernelWarning)
        problem.filter()


def test_out_of_memory_stays_what_it_is(failing):
    failing("forward", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        problem_of("dense-scalar", T=5).filter()


def test_a_checkpointed_layer_trains_on(failing):
    """The backward kernel fails while one call waits to be run again: both runs save the same."""
    problem = problem_of("dense-scalar", T=20)
    expected = torch.autograd.grad(problem.filter().output.sum(), problem.k)

    def run(k):
        return replace(problem, k=k).filter().output

    failing("backward")
    once = checkpoint(run, problem.k, use_reentrant=False)
    twice = checkpoint(run, problem.k, use_reentrant=False)
    with pytest.warns(mbd.KernelWarning):
        found = torch.autograd.grad(((once + twice) / 2).sum(), problem.k)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_inside_a_compiled_graph(kernel, failing):
    torch.compiler.reset()
    problem = problem_of("dense-scalar", T=20)
    expected = torch.autograd.grad(problem.filter().output.sum(), problem.k)
    failing(kernel)
    run = torch.compile(lambda k: replace(problem, k=k).filter().output, backend="aot_eager", fullgraph=True)
    with pytest.warns(mbd.KernelWarning):
        found = torch.autograd.grad(run(problem.k).sum(), problem.k)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class TestWhichTriton:
    """Versions are read from the installed package; nothing is imported to refuse one."""

    @pytest.mark.parametrize("version", ["3.4.0", "2.3.1", "3.4.0+git123"])
    def test_too_old(self, version, monkeypatch):
        monkeypatch.setattr(triton_support, "version", lambda: version)
        with pytest.warns(mbd.KernelWarning, match=rf"Triton {version[:5]}.* is too old .*triton>=3\.5") as said:
            assert [triton_support.usable() for _ in range(2)] == [False, False]
        assert count(said) == 1
        message = rf'^backend: expected one that is installed, got "triton" with Triton {version[:5]}.*triton>=3\.5'
        with pytest.raises(ValueError, match=message):
            problem_of("dense-scalar", T=2).filter(backend="triton")

    @pytest.mark.parametrize("version", ["3.5.1", "3.7.1+git123", "3.10.0", "4.0.0"])
    def test_new_enough(self, version, monkeypatch):
        monkeypatch.setattr(triton_support, "version", lambda: version)
        assert triton_support.usable()

    def test_none(self, monkeypatch):
        """Without Triton `backend="auto"` is quiet: nobody installed it in vain."""
        monkeypatch.setattr(triton_support, "version", lambda: None)
        with warnings.catch_warnings():
            warnings.simplefilter("error", mbd.KernelWarning)
            assert not triton_support.usable()

    def test_it_cannot_be_imported(self, monkeypatch):
        broken = ImportError("libtriton.so: undefined symbol")
        monkeypatch.setattr(triton_support, "_import_error", lambda: broken)
        with pytest.warns(mbd.KernelWarning, match="cannot be imported: ImportError: libtriton.so"):
            assert not triton_support.usable()
        with pytest.raises(mbd.KernelError, match="cannot be imported: ImportError: libtriton.so") as caught:
            problem_of("dense-scalar", T=2).filter(backend="triton")
        assert caught.value.__cause__ is broken

    def test_the_extra_asks_for_the_same(self):
        project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        assert f'triton = ["{triton_support.REQUIREMENT};' in project
