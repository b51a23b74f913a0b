"""The kernels in order of preference: the first that can run a request does, and the loop runs them all.

A kernel is a module with `NAME`, `BACKEND`, `why_not(design, request)`, which returns None or the reason why it cannot
run, and `run(design, request)`. Reasons follow `expected another backend …` in an error message. A kernel that looks by
itself whether the state which it returns has a flaw, and then returns a negative precision, has `CHECKS_STATE = True`.
One that filters packed sequences by itself has `run_packed`. One may have `passes_on(design)`: whether its output or
state is not finite if q, k or v is not, wherever that may be.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from membydesign.filter import fla, loop, readable
from membydesign.filter.inputs import Inputs, Request, Run
from membydesign.filter.native import additive as native_additive
from membydesign.filter.native import block as native_block
from membydesign.filter.native import build
from membydesign.filter.native import dense as native_dense
from membydesign.filter.native import diagonal as native_diagonal
from membydesign.filter.native import forgetting as native_forgetting
from membydesign.filter.native import low_rank as native_low_rank
from membydesign.filter.native import mean_pass as native_mean_pass
from membydesign.filter.native import recurrence as native_recurrence
from membydesign.filter.native import step as native_step
from membydesign.filter.onnx import linear_attention as onnx_linear_attention
from membydesign.filter.onnx import scan as onnx_scan
from membydesign.filter.onnx import support as onnx_support
from membydesign.filter.packing import run_packed
from membydesign.filter.torch import additive, dense, forgetting, hidden_markov, recurrence, two_pass
from membydesign.filter.triton import kernel as triton
from membydesign.state import Sizes

if TYPE_CHECKING:
    from membydesign.design import Design, StepParameter


Kernel = Any
"""A module with `NAME`, `BACKEND`, `why_not` and `run`."""

KERNELS: tuple[Kernel, ...] = (
    fla,
    triton,
    native_dense,
    native_diagonal,
    native_forgetting,
    native_block,
    native_low_rank,
    native_mean_pass,
    native_additive,
    native_recurrence,
    dense,
    forgetting,
    two_pass,
    additive,
    recurrence,
    hidden_markov,
    loop,
)

BACKENDS = ("auto", "torch", "native", "triton", "fla")


def candidates(design: Design) -> tuple[Kernel, ...]:
    """The kernels that may run a design, in order of preference."""
    return KERNELS if design.wrapped is None else _of_wrapped()


@functools.cache
def _of_wrapped() -> tuple[Kernel, ...]:
    """For designs that wrap another: the kernels of the other, followed by what this one adds."""
    from membydesign.filter.scaled import Scaled

    return (*(Scaled(kernel) for kernel in KERNELS if kernel is not loop), loop)


def choose(design: Design, request: Request, method: str) -> Kernel:
    """The kernel that runs a request; an operator of ONNX, whatever the user named, while `torch.onnx.export` traces.

    Raises:
        ValueError: if no kernel of the backend that the user named can run it, with each one's reason.
    """
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        return onnx_scan if onnx_linear_attention.why_not(design, request) else onnx_linear_attention
    if method == "recurrent":
        return loop
    reasons = []
    unreadable = None if torch.compiler.is_compiling() else readable.why_not(request.named_tensors())
    for kernel in candidates(design):
        if request.backend in ("auto", kernel.BACKEND):
            reason = None if kernel.BACKEND == "torch" else unreadable
            reason = reason or kernel.why_not(design, request)
            if reason is None:
                return kernel
            reasons.append(reason)
    raise ValueError(
        f'backend: expected "auto" or "torch" {"; ".join(dict.fromkeys(reasons))}, got "{request.backend}"'
    )


def run_all(design: Design, request: Request, kernel: Kernel) -> list[Run]:
    """One run for a batch, or one for each packed sequence (all in one, from kernels that take packed sequences)."""
    if kernel.BACKEND in ("triton", "fla") and not torch.compiler.is_compiling():  # native code sees to it itself
        request = request.map(readable.settled)
    if request.bounds is None or kernel is fla:
        return [kernel.run(design, request)]
    if hasattr(kernel, "run_packed"):
        return kernel.run_packed(design, request)
    return run_packed(design, request, kernel.run, pad=kernel is not loop)


def why_not_each(design: Design, D: int = 64, M: int = 64) -> dict[str, str | None]:
    """Every kernel by name, with the reason why it cannot run a design in float32 on a CPU; None if it can.

    Examples:
        >>> why_not_each(catalogue["gated_deltanet"])["torch, dense covariance in chunks"]
        'for Gated DeltaNet, since this kernel propagates a dense covariance'
    """
    request = _sample(design, D, M)
    return {kernel.NAME: kernel.why_not(design, request) for kernel in candidates(design)}


def why_not_each_step(design: Design, D: int = 64, M: int = 64) -> dict[str, str | None]:
    """Every decoding step by name, in the order in which `filter_step` tries them; otherwise as `why_not_each`."""
    x = _sample(design, D, M).x
    native = native_step.why_not(design) or build.why_not(native_step.SOURCE, x.q)
    return {native_step.NAME: native, triton.STEP_NAME: triton.why_not_step(design, x), loop.STEP_NAME: None}


def onnx_operator(design: Design, D: int = 64, M: int = 64) -> onnx_support.Support:
    """Which operator of ONNX runs a design, and why no better one does (docs/howto/export.md).

    Examples:
        >>> onnx_operator(catalogue["kda"]).operator, onnx_operator(catalogue["bayesian_layer"]).operator
        ('LinearAttention', 'Scan')
    """
    return onnx_support.support(design, _sample(design, D, M))


def _sample(design: Design, D: int, M: int) -> Request:
    """A request of two tokens in float32 on a CPU."""
    T = 2

    def sample(parameter: StepParameter) -> torch.Tensor:
        within = {"> 0": 1.0, "[0, 1]": 0.5}.get(parameter.bound, 0.0)
        return torch.full((1, T, 1, *parameter.sizes(D, M, design.groups)), within)

    q, v = torch.zeros(1, T, 1, D), torch.zeros(1, T, 1, M)
    inputs = Inputs(q, q, v, {parameter.name: sample(parameter) for parameter in design.step_parameters})
    initial = design.prior(Sizes(1, 1, D, M), dtype=torch.float32, device="cpu")
    return Request(inputs, initial, torch.float32)
