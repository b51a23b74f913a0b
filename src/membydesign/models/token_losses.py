"""Losses of tokens over large vocabularies, a slice of tokens at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from membydesign.layers.base import positive
from membydesign.layers.parameters import wide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from membydesign.models.modeling import MemoryForCausalLM

    Batch = Mapping[str, Tensor]

BATCH = ("input_ids", "attention_mask", "cu_seqlens")
"""What a batch may hold: arguments of the model."""

SLICE = 512
"""Tokens whose logits are in memory at a time: those of a whole batch would be the largest tensor of a run by far."""

FEW = 2**25
"""So many logits, 128 MiB in float32, are made at once and kept, which saves making them again for the gradients."""


def model_inputs(batch: Batch) -> dict[str, Any]:
    """A batch as arguments of a model; refuses what is none."""
    if "input_ids" not in batch:
        raise ValueError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
    for name in batch:
        if name not in BATCH:
            raise ValueError(f"batch: expected {', '.join(BATCH)} alone, got {name!r}")
    return dict(batch)


def next_token_losses(model: MemoryForCausalLM, batch: Batch, *, slice_size: int = SLICE) -> Tensor:
    """The cross-entropy of every token given those before it, [N], in nats.

    Args:
        model: a language model.
        batch: `input_ids` [B,T], and `attention_mask` or `cu_seqlens` if need be. First tokens of sequences are no
            targets.
        slice_size: tokens whose logits are in memory at a time; the result does not depend on it.
    """
    inputs = model_inputs(batch)
    ids, present, bounds = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("cu_seqlens")
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    wanted = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if present is not None:
        wanted &= present[:, 1:].bool() & present[:, :-1].bool()
    if bounds is not None:
        starts = bounds[1:-1].to(ids.device, torch.long)
        wanted[0, starts[(starts > 0) & (starts < ids.shape[1])] - 1] = False  # empty sequences begin at the ends too
    return token_cross_entropies(
        hidden[:, :-1][wanted], ids[:, 1:][wanted], model.lm_head.weight, slice_size=slice_size
    )


def token_divergences(
    teacher_hidden: Tensor,
    student_hidden: Tensor,
    teacher_head: Tensor,
    student_head: Tensor,
    *,
    slice_size: int = SLICE,
) -> Tensor:
    r"""$\mathrm{KL}(p \,\|\, q) = \sum_w p_w (\log p_w - \log q_w)$ of each token's next-token distributions, [N].

    Exact, in float32 at least, and without ever holding the logits of more than `slice_size` tokens: those of a slice
    are computed again when gradients are. Only if all of them are no more than `FEW`, they are made at once and kept.

    Args:
        teacher_hidden: last hidden states of the teacher, [N,hidden_size]; p comes from them.
        student_hidden: of the student, [N,hidden_size]; q.
        teacher_head: the teacher's map to logits, [vocab_size,hidden_size].
        student_head: the student's.
        slice_size: tokens at a time.
    """

    def divergence(x: Tensor, y: Tensor) -> Tensor:
        log_p = wide(F.linear(x, teacher_head)).log_softmax(-1)
        log_q = wide(F.linear(y, student_head)).log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    return _in_slices(divergence, teacher_hidden, student_hidden, len(student_head), slice_size)


def token_cross_entropies(hidden: Tensor, targets: Tensor, head: Tensor, *, slice_size: int = SLICE) -> Tensor:
    """The cross-entropy of each token's next one, [N], in nats, as `token_divergences` goes about it.

    Args:
        hidden: last hidden states, [N,hidden_size].
        targets: the next tokens, [N].
        head: the map to logits, [vocab_size,hidden_size].
        slice_size: tokens at a time.
    """

    def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(wide(F.linear(x, head)), target, reduction="none")

    return _in_slices(cross_entropy, hidden, targets, len(head), slice_size)


def _in_slices(
    f: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor, vocabulary: int, slice_size: int
) -> Tensor:
    size = positive("slice_size", slice_size)
    if not len(first):
        raise ValueError("batch: expected at least one token to predict, got none")
    if len(first) * vocabulary <= FEW:
        return f(first, second)
    parts = [
        checkpoint(f, x, y, use_reentrant=False, preserve_rng_state=False)
        for x, y in zip(first.split(size), second.split(size), strict=True)
    ]
    return torch.cat(parts)
