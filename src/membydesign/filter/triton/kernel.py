"""The dense filter on a GPU, as a kernel of `filter.kernels`. Triton is imported only to run it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from membydesign.filter import transforms
from membydesign.filter.linear import dense_problem, why_not_dense
from membydesign.filter.triton import support, table
from membydesign.state import named_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Inputs, Request, Run

NAME, BACKEND, STEP_NAME = "Triton, dense covariance", "triton", "Triton, one token"
_NOT_ON_GPU = "for these tensors, since the kernels run in float32 on a GPU with Triton installed"


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request, or under backend="auto" is not the best choice; None if it is.

    Raises:
        KernelError: if backend="triton" was named and Triton is missing, too old or broken.
    """
    if request.backend == "triton":
        support.refuse()
    q, D = request.x.q, request.x.q.shape[-1]
    if request.backend != "triton" and not fits(q):
        return _NOT_ON_GPU
    reason = why_not_dense(design, request.x)
    if reason is not None:
        return reason
    if request.backend != "triton":
        if request.chunk_size is not None:
            return f"with chunk_size={request.chunk_size}, since the kernels choose their own"
        return None
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"for tensors on {q.device}, since Triton needs a GPU (or TRITON_INTERPRET=1 in the environment from the "
            "start, to run its kernels slowly on a CPU)"
        )
    if table.LARGEST < D:
        return f"for keys of size {D}, since the kernels go up to {table.LARGEST}"
    if request.chunk_size not in (None, table.CHUNK):
        return f"with chunk_size={request.chunk_size}, since the kernels have chunks of {table.CHUNK}"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] on a GPU; under backend="auto" through torch if a kernel cannot be compiled."""
    from membydesign.filter.triton.dense import filter_triton

    drift, noise, x = dense_problem(design, request.x)
    return filter_triton(
        drift,
        noise,
        request.initial,
        x,
        return_variance=request.return_variance,
        return_evidence=request.return_evidence,
        input_precision=_input_precision(),
        fallback=request.backend == "auto",
    )


def step(design: Design, state: Any, x: Inputs) -> tuple[Tensor, Any, Tensor] | None:
    """One token, [B,1]: read-out [B,H,M], new state and precision [B,1,H,G]; None where another step is better."""
    if why_not_step(design, x) is not None or _differentiated(state, x):
        return None
    from membydesign.filter.triton.step import step_triton

    drift, noise, tokens = dense_problem(design, x)
    result = step_triton(drift, noise, state, tokens.map(lambda part: part[:, 0]), fallback=True)
    if result is None:
        return None
    output, state, precision = result
    return output, state, precision.unsqueeze(1)


def why_not_step(design: Design, x: Inputs) -> str | None:
    """Why the decoding step cannot run these inputs; None if it can."""
    return why_not_dense(design, x) or (None if fits(x.q) else _NOT_ON_GPU)


def fits(q: Tensor) -> bool:
    """Whether the kernels are the best choice for tensors like q: float32, on a GPU, of a size that they have."""
    on_gpu = q.device.type == "cuda" and q.dtype == torch.float32
    return on_gpu and q.shape[-1] <= table.LARGEST and support.usable()


def _differentiated(state: Any, x: Inputs) -> bool:
    """Whether a gradient may be needed, or torch follows each operation: then the step is taken in torch."""
    if torch.compiler.is_compiling() or transforms.followed():
        return True
    tensors = (*(part for _, part in named_tensors(state)), *x.named().values())
    return torch.is_grad_enabled() and any(part.requires_grad for part in tensors)


def _input_precision() -> str:
    """How the GPU kernels multiply: MEMBYDESIGN_INPUT_PRECISION in the environment, "ieee" unless it is set."""
    precision = os.environ.get("MEMBYDESIGN_INPUT_PRECISION", "ieee")
    if precision not in ("ieee", "tf32x3"):
        raise ValueError(f'MEMBYDESIGN_INPUT_PRECISION: expected "ieee" or "tf32x3", got {precision!r}')
    return precision
