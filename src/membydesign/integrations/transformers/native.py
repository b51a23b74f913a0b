"""The native mean pass and decoding step as Transformers' layers need them: without subnormal numbers.

Decays of these layers reach e⁻¹⁰ for one token, so that products of a chunk's decays fall below 1e-38. Arithmetic on
such subnormal numbers takes many times as long; while our code runs, they count as zero. torch's setting is one of the
calling thread, so that with several threads only its own share of the heads gains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from membydesign.filter import transforms
from membydesign.filter.native import mean_pass as native
from membydesign.filter.native import operators

if TYPE_CHECKING:
    from types import TracebackType

_DESCRIPTION: Any = next(op for op in operators.DESCRIBED if op.name == "mean_pass")
_SUBNORMAL = torch.tensor(1e-40)


class without_subnormals:
    """Context manager: subnormal numbers are zero in this thread, and afterwards what they were before."""

    def __enter__(self) -> None:
        self.before = not (_SUBNORMAL * 1).item()
        torch.set_flush_denormal(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_flush_denormal(self.before)


class _MeanPass(torch.autograd.Function):
    """The mean pass of `filter.native`, forward and backward, without subnormal numbers."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with without_subnormals():
            outputs = _DESCRIPTION.forward(*inputs)
        ctx.set_materialize_grads(False)
        if inputs[-1]:
            _DESCRIPTION.remember(ctx, inputs, outputs)
        private = [output for output, o in zip(outputs, _DESCRIPTION.outputs, strict=True) if o.private]
        ctx.mark_non_differentiable(*private)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            operators.refuse_second_derivatives(ctx)
        with without_subnormals():
            return _DESCRIPTION.gradients(_DESCRIPTION.backward, ctx, grads)


def mean_pass(
    q: Tensor, k: Tensor | None, v: Tensor, direction: Tensor, strength: Tensor, log_decay: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the mean over [B,T]: outputs [B,T,H,M] and the last mean; arguments as `filter.native.mean_pass` has them."""
    inputs = (q, k, v, direction, strength, log_decay, None, mean, native.chunk_size(q.shape[-1]), True, False)
    if torch.compiler.is_compiling() or transforms.active():
        output, mean, *_ = native.OPERATOR.run(*inputs)
        return output, mean
    follow = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    output, mean, *_ = _MeanPass.apply(*inputs, follow)
    return output, mean
