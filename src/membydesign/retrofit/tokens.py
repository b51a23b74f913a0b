"""Losses of tokens over large vocabularies, a slice of tokens at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from membydesign.layers.base import positive
from membydesign.layers.parameters import wide

if TYPE_CHECKING:
    from collections.abc import Callable


def token_divergences(
    teacher_hidden: Tensor, student_hidden: Tensor, teacher_head: Tensor, student_head: Tensor, *, slice_size: int = 512
) -> Tensor:
    r"""$\mathrm{KL}(p \,\|\, q) = \sum_w p_w (\log p_w - \log q_w)$ of each token's next-token distributions, [N].

    Exact, in float32 at least, and without ever holding the logits of more than `slice_size` tokens: those of a slice
    are computed again when gradients are.

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

    return _in_slices(divergence, teacher_hidden, student_hidden, slice_size)


def token_cross_entropies(hidden: Tensor, targets: Tensor, head: Tensor, *, slice_size: int = 512) -> Tensor:
    """The cross-entropy of each token's next one, [N], in nats, as `token_divergences` goes about it.

    Args:
        hidden: last hidden states, [N,hidden_size].
        targets: the next tokens, [N].
        head: the map to logits, [vocab_size,hidden_size].
        slice_size: tokens at a time.
    """

    def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(wide(F.linear(x, head)), target, reduction="none")

    return _in_slices(cross_entropy, hidden, targets, slice_size)


def _in_slices(f: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor, slice_size: int) -> Tensor:
    size = positive("slice_size", slice_size)
    if not len(first):
        raise ValueError("batch: expected at least one token to predict, got none")
    parts = [
        checkpoint(f, x, y, use_reentrant=False, preserve_rng_state=False)
        for x, y in zip(first.split(size), second.split(size), strict=True)
    ]
    return torch.cat(parts)
