"""Context parallelism: the tokens of every sequence split over processes, and the loss of one process in all of them.

Each process passes its own tokens and labels. Layers fetch what they need of earlier tokens (`membydesign.Stretch`).
The last token of a process predicts the first of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from membydesign.filter import Stretch
from membydesign.filter.context.plan import Schedule

if TYPE_CHECKING:
    from membydesign.models.modeling import MemoryForCausalLM, MemoryModel

IGNORED = -100
"""The label of a token that is nobody's target."""


@dataclass(frozen=True)
class Split:
    """How a model's tokens are split: over which processes, and on which schedule."""

    group: Any
    schedule: Schedule

    def __deepcopy__(self, _: Any) -> Split:
        """Itself: a copy of a model belongs to the same processes."""
        return self


def context_parallel(model: MemoryForCausalLM, group: Any = None, schedule: Schedule = "auto") -> MemoryForCausalLM:
    """Split the tokens that a model is called with over the processes of a group, in place.

    Args:
        model: the same weights in every process.
        group: of `torch.distributed`, in the order of time; by default a new one of all processes. It must not be the
            one that DDP or FSDP use, whose traffic runs at times of its own.
        schedule: "scan", "pipeline" or "auto", as `Stretch.of` takes it.

    Returns:
        The model. Every process of the group calls it together, each with its own tokens: process r with those that
        follow process r−1's, as many as it likes. `cu_seqlens` counts the tokens of all. The loss is the mean over the
        targets of all processes, in each of them. The gradients of weights, averaged over processes as DDP and FSDP
        average them, are those of one process.

    In every process that torchrun started:

        model = context_parallel(MemoryForCausalLM(config))
        model = torch.nn.parallel.DistributedDataParallel(model)
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f'schedule: expected "auto", "scan" or "pipeline", got {schedule!r}')
    for i, mixer in enumerate(model.model.mixers()):
        reason = mixer.why_not_split()
        if reason is not None:
            name = model.config.layers[i]
            raise ValueError(f"model: expected layers whose tokens can be split, got layer {i} ({name}), {reason}")
    model.model.split = Split(dist.new_group() if group is None else group, schedule)
    return model


def stretch_of(
    model: MemoryModel, x: Tensor | None, stretch: Stretch | None, cu_seqlens: Tensor | None
) -> Stretch | None:
    """Which tokens x, ids or embeddings [B,T,...], are: as the caller says, or found out; None for a whole sequence."""
    if stretch is not None:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: expected None with a stretch, which has the boundaries, got some")
        return stretch
    split = model.split
    if split is None or x is None:
        return None
    layers = len(model.layers)
    return Stretch.of(x, group=split.group, cu_seqlens=cu_seqlens, schedule=split.schedule, layers=layers)


def refuse_with_stretch(**given: Any) -> None:
    """Refuse arguments that cannot be combined with a stretch."""
    instead = {
        "past_key_values": "None",
        "use_cache": "False",
        "position_ids": "None (cu_seqlens has the boundaries of all processes' tokens)",
        "attention_mask": "no padding (pack sequences, and pass cu_seqlens)",
        "logits_to_keep": "0 with labels",
    }
    for name, value in given.items():
        if name == "attention_mask":
            refused = isinstance(value, Tensor) and not bool(value.all())
        else:
            refused = isinstance(value, Tensor) or value not in (None, False, 0)
        if refused:
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) or name == "past_key_values" else repr(value)
            raise ValueError(f"{name}: expected {instead[name]} where tokens are split over processes, got {got}")


def targets(labels: Tensor, stretch: Stretch) -> Tensor:
    """The label of the token after each of this process's, [B,T], whichever process has it."""
    first = labels[:, 0] if labels.shape[1] else labels.new_full((labels.shape[0],), IGNORED)
    every = [torch.empty_like(first) for _ in range(stretch.size)]
    dist.all_gather(every, first.contiguous(), stretch.group)
    following = [r for r in range(stretch.rank + 1, stretch.size) if stretch.lengths[r]]
    after = every[following[0]] if following else torch.full_like(first, IGNORED)
    shifted = torch.cat((labels, after[:, None]), 1)[:, 1:][:, : stretch.tokens].clone()
    for bound in set(stretch.bounds or ()):
        if stretch.start < bound <= stretch.end:  # nothing of its own precedes the first token of a packed sequence
            shifted[:, bound - 1 - stretch.start] = IGNORED
    return shifted


def loss_of_all(model: MemoryForCausalLM, logits: Tensor, labels: Tensor, stretch: Stretch, **kwargs: Any) -> Tensor:
    """The mean loss of all processes' targets; with `num_items_in_batch`, the sum of this one's divided by it."""
    shifted, vocabulary = targets(labels, stretch), model.config.vocab_size
    if kwargs.get("num_items_in_batch") is not None:
        return model.loss_function(logits, labels, vocabulary, shift_labels=shifted, **kwargs)
    count = (shifted != kwargs.get("ignore_index", IGNORED)).sum()
    dist.all_reduce(count, group=stretch.group)
    kwargs = {**kwargs, "num_items_in_batch": count}
    own = model.loss_function(logits, labels, vocabulary, shift_labels=shifted, **kwargs)
    return _Averaged.apply(own * stretch.size, stretch.group)


class _Averaged(torch.autograd.Function):
    """The mean over processes; the gradient of each is that of its own share, to be averaged with the others' later."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        del ctx
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return grad, None
