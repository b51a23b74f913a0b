"""What processes tell one another, with gradients: gathered tensors, hand-overs from one process to the next.

Backward communicates too, so it must reach every exchange in every process, in the same order, whether or not the
process used what it got. Therefore every exchange has an anchor, from which autograd finds a way back to whatever a
user may ask gradients of, and its result is `tied` to what the process goes on with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence


def anchored(tensors: Sequence[Tensor]) -> Tensor:
    """An anchor: no numbers, but a place in the graph of each of the tensors, and a leaf of its own."""
    like = tensors[0].detach()
    leaf = torch.zeros(0, device=like.device, requires_grad=torch.is_grad_enabled())
    return torch.cat([leaf, *(x.reshape(-1)[:0].to(leaf.dtype) for x in tensors if x.requires_grad)])


def gather(own: Sequence[Tensor], anchor: Tensor, group: Any) -> list[list[Tensor]]:
    """What every process passes here, tensors of the same shapes in each: one list for each process.

    Gradients of all processes are added up, as those of one sum of all losses.
    """
    line, shapes = _joined(own)
    every = _Gather.apply(line, anchor, group)
    return [_split(part, shapes) for part in every.unbind()]


def receive(shapes: Sequence[torch.Size], like: Tensor, anchor: Tensor, source: int, group: Any) -> list[Tensor]:
    """What `send` passes in process `source`: tensors of these shapes, in the type and on the device of `like`."""
    line = _Receive.apply(like.detach(), anchor, sum(shape.numel() for shape in shapes), source, group)
    return _split(line, shapes)


def send(own: Sequence[Tensor], anchor: Tensor, target: int, group: Any) -> Tensor:
    """Pass tensors on to process `target`; what this process goes on with must be `tied` to the result."""
    line, _ = _joined(own)
    return _Send.apply(line, anchor, target, group)


def from_last(own: Sequence[Tensor], group: Any) -> list[Tensor]:
    """What the last process passes here, in all processes; gradients of all are added up in the last."""
    line, shapes = _joined(own)
    return _split(_FromLast.apply(line, anchored([line]), group), shapes)


def tied(x: Tensor, exchanged: Sequence[Tensor]) -> Tensor:
    """The same x, with a graph through which backward reaches exchanges that x may not depend on."""
    return _Tied.apply(x, *exchanged) if exchanged and torch.is_grad_enabled() else x


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, list[torch.Size]]:
    return torch.cat([x.reshape(-1) for x in tensors]), [x.shape for x in tensors]


def _split(line: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = line.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _nothing(grad: Tensor) -> Tensor:
    """The gradient of an anchor."""
    return torch.zeros(0, device=grad.device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor, group: Any) -> Tensor:
        del anchor
        ctx.group = group
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own.contiguous(), group)
        return torch.stack(every)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], _nothing(grad), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, anchor: Tensor, numel: int, source: int, group: Any) -> Tensor:
        del anchor
        ctx.source, ctx.group = source, group
        line = like.new_empty(numel)
        dist.recv(line, dist.get_global_rank(group, source), group)
        return line

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.send(grad.contiguous(), dist.get_global_rank(ctx.group, ctx.source), ctx.group)
        return None, _nothing(grad), None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor, target: int, group: Any) -> Tensor:
        del anchor
        ctx.target, ctx.group, ctx.shape = target, group, own.shape
        dist.send(own.contiguous(), dist.get_global_rank(group, target), group)
        return own.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_own = grad.new_empty(ctx.shape)
        dist.recv(of_own, dist.get_global_rank(ctx.group, ctx.target), ctx.group)
        return of_own, _nothing(grad), None, None


class _FromLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor, group: Any) -> Tensor:
        del anchor
        ctx.group, last = group, dist.get_world_size(group) - 1
        line = own.clone(memory_format=torch.contiguous_format)
        dist.broadcast(line, dist.get_global_rank(group, last), group)
        return line

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, last = grad.clone(memory_format=torch.contiguous_format), dist.get_world_size(ctx.group) - 1
        dist.all_reduce(grad, group=ctx.group)
        return grad if dist.get_rank(ctx.group) == last else torch.zeros_like(grad), _nothing(grad), None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *exchanged: Tensor) -> Tensor:
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in exchanged]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
