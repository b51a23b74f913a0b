"""DTensors: every process filters its own shard.

A filter is independent for every batch entry and head, so arguments that are sharded over these axes, or replicated,
are filtered where they lie and nothing is communicated. Results are DTensors with the same placements.

torch.distributed.tensor is imported only where a DTensor exists, since its import takes long.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from membydesign.errors import FilterError
from membydesign.filter.checks import check_design, check_sequences, refuse, state_form
from membydesign.filter.readable import dtensor_class
from membydesign.state import Sizes, map_state, named_tensors, zip_states

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from membydesign.design import Design

BATCH = 0


def any_sharded(tensors: Sequence[object]) -> bool:
    """Whether one of these is a DTensor."""
    kind = dtensor_class()
    return kind is not None and any(isinstance(x, kind) for x in tensors)


class Layout(NamedTuple):
    """How the axes B and H of all arguments lie on a mesh.

    Attributes:
        mesh: the processes.
        axes: "B", "H" or None (replicated), one for each axis of the mesh.
    """

    mesh: Any
    axes: tuple[str | None, ...]

    def placements(self, heads: int) -> list[Any]:
        """The placements of a tensor whose axis `heads` is H, and whose first axis is B."""
        from torch.distributed.tensor import Replicate, Shard

        return [Replicate() if axis is None else Shard(BATCH if axis == "B" else heads) for axis in self.axes]

    def local(self, x: Any, heads: int) -> Tensor:
        """The shard of x that this process filters; the gradients of what one number gives to all are summed."""
        from torch.distributed.tensor import Partial, Replicate

        if not x.ndim:
            summed = [Replicate() if axis is None else Partial() for axis in self.axes]
            return x.redistribute(placements=[Replicate()] * len(self.axes)).to_local(grad_placements=summed)
        return x.redistribute(placements=self.placements(heads)).to_local()

    def whole(self, x: Tensor, shape: torch.Size, heads: int) -> Tensor:
        """The DTensor of a shape of which each process computed x."""
        strides = torch.empty(shape, device="meta").stride()
        return dtensor_class().from_local(
            x.contiguous(), self.mesh, self.placements(heads), run_check=False, shape=shape, stride=strides
        )


class Shard(NamedTuple):
    """The arguments of a filter that belong to this process."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    state: Any
    parameters: dict[str, Any]

    @property
    def empty(self) -> bool:
        """Whether there are more processes than batch entries or heads, and this one has none."""
        return not self.q.numel()

    def connected(self, x: Tensor) -> Tensor:
        """An empty x with gradients for all arguments, so that all processes go through backward alike."""
        every = [self.q, self.k, self.v, *(t for _, t in named_tensors(self.state))]
        every += [p for p in self.parameters.values() if isinstance(p, Tensor)]
        return x + sum(t.sum() * 0 for t in every)


def shard(
    design: Design, q: Tensor, k: Tensor, v: Tensor, state: Any, name: str, parameters: Mapping[str, Any], lead: str
) -> Shard:
    """Take the shard of this process.

    Args:
        design: the assumptions.
        q: queries, with the axes of `lead` and then D.
        k: write keys, likewise.
        v: written values, with the axes of `lead` and then M.
        state: the state to start from, or None.
        name: the argument that carries the state.
        parameters: step parameters by name.
        lead: "B,T,H" for sequences, "B,H" for one step.
    """
    check_design(design)
    check_sequences(design, q, k, v, lead)
    heads = lead.count(",")
    tokens: dict[str, Any] = {"q": q, "k": k, "v": v}
    tokens |= {key: p for key, p in parameters.items() if isinstance(p, Tensor)}
    states = dict(named_tensors(state, name))
    for key, x in {**tokens, **states}.items():
        _check_kind(key, x, q.shape[: heads + 1] if key in tokens else None)
    layout = _layout(tokens, states, heads)
    local = {key: layout.local(x, heads) if _is_dtensor(x) else x for key, x in tokens.items()}
    own = {key: local.get(key, p) for key, p in parameters.items()}
    memory = map_state(lambda x: layout.local(x, 1), state)
    return Shard(layout, local["q"], local["k"], local["v"], memory, own)


def run(own: Shard, filter_own: Callable[[], Any]) -> Any:
    """Call a filter of this process's shard; its errors say whose shard they are about."""
    try:
        return filter_own()
    except (ValueError, FilterError) as error:
        where = f" (in the shard of rank {own.layout.mesh.get_rank()}, whose q has shape {list(own.q.shape)})"
        raise type(error)(f"{error}{where}") from error


def plain_bounds(cu_seqlens: Tensor | None, layout: Layout) -> Tensor | None:
    """The boundaries of packed sequences, which all processes share."""
    if cu_seqlens is not None and "B" in layout.axes:
        expected = "q replicated or sharded over heads, since packing puts all sequences into one row"
        refuse("cu_seqlens", expected, f"q sharded over batch on {layout.mesh}")
    return cu_seqlens.full_tensor() if _is_dtensor(cu_seqlens) else cu_seqlens  # pyright: ignore


def empty_state(design: Design, own: Shard, state_dtype: torch.dtype | None = None) -> Any:
    """The state of a process without batch entries or heads, in the type of the others'."""
    sizes = Sizes(own.q.shape[0], own.q.shape[-2], own.q.shape[-1], own.v.shape[-1])
    tensors = [own.q, *(x for _, x in named_tensors(own.state))]
    tensors += [p for p in own.parameters.values() if isinstance(p, Tensor) and p.is_floating_point()]
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors), state_dtype or torch.float32)
    state = own.state
    if state is None:
        state = design.prior(sizes, dtype=dtype, device=own.q.device)
    return map_state(lambda x: own.connected(x).to(dtype), state)


def whole_state(design: Design, own: Shard, state: Any, sizes: Sizes) -> Any:
    """The state of all processes, from the one that this process computed."""
    form = state_form(design, sizes)
    return zip_states(lambda parts: own.layout.whole(parts[0], parts[1].shape, 1), [state, type(state)(*form)])


def _is_dtensor(x: object) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(x, kind)


def _check_kind(name: str, x: Tensor, leading: torch.Size | None) -> None:
    """Refuse plain tensors among DTensors, and shapes that could not be sharded as q is."""
    if not _is_dtensor(x):
        if x.ndim or x.requires_grad:
            refuse(
                name, "a DTensor, as other arguments are (torch.distributed.tensor.distribute_tensor)", "a plain one"
            )
    elif x.ndim and leading is not None and x.shape[: len(leading)] != leading:
        refuse(name, f"the leading axes of q, {list(leading)}", f"shape {list(x.shape)}")


def _layout(tokens: Mapping[str, Any], states: Mapping[str, Any], heads: int) -> Layout:
    """The layout that all arguments can have without communication."""
    every = [(key, x, heads) for key, x in tokens.items()] + [(key, x, 1) for key, x in states.items()]
    every = [(key, x, axis) for key, x, axis in every if _is_dtensor(x) and x.ndim]
    first, like, _ = every[0]
    mesh, axes = like.device_mesh, [None] * like.device_mesh.ndim
    owners = [first] * like.device_mesh.ndim
    for key, x, axis in every:
        if x.device_mesh != mesh:
            refuse(key, f"a DTensor on the mesh of {first}, {mesh}", f"one on {x.device_mesh}")
        for i, placement in enumerate(x.placements):
            if placement.is_replicate() or placement.is_partial():
                continue  # a shard of it can be taken, or summed, where others are sharded
            kind = {BATCH: "B", axis: "H"}.get(getattr(placement, "dim", -1) % x.ndim)
            if kind is None or type(placement).__name__ != "Shard":
                refuse(
                    key,
                    f"a DTensor that is replicated, or sharded over batch (Shard({BATCH})) or heads (Shard({axis}))",
                    f"placements {x.placements}; x.redistribute(placements=...) changes them",
                )
            if axes[i] not in (None, kind):
                refuse(key, f"placements that go with those of {owners[i]}", f"placements {x.placements}")
            if axes[i] is None:
                axes[i], owners[i] = kind, key
    return Layout(mesh, tuple(axes))
