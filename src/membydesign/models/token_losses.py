"""Losses of tokens over large vocabularies, a slice of tokens at a time, in the forward pass and for the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from membydesign.layers.base import positive
from membydesign.layers.parameters import wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from membydesign.models.modeling import MemoryForCausalLM

    Batch = Mapping[str, Tensor]

BATCH = ("input_ids", "attention_mask", "cu_seqlens")
"""What a batch may hold: arguments of the model."""

SLICE = 512
"""Tokens whose logits are in memory at a time: those of a whole batch would be the largest tensor of a run by far."""


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Turn a batch into arguments of a model; reject unknown keys."""
    if "input_ids" not in batch:
        raise ValueError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
    for name in batch:
        if name not in BATCH:
            raise ValueError(f"batch: expected {', '.join(BATCH)} alone, got {name!r}")
    return dict(batch)


def next_token_losses(model: MemoryForCausalLM, batch: Batch, *, slice_size: int = SLICE) -> Tensor:
    """Compute the cross-entropy of every token after those before it, [N], in nats.

    Args:
        model: a language model.
        batch: `input_ids` [B,T], and `attention_mask` or `cu_seqlens` if need be. First tokens of sequences are no
            targets.
        slice_size: tokens whose logits are in memory at a time; the result does not depend on it.
    """
    inputs = model_inputs(batch)
    ids, present, bounds = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("cu_seqlens")
    if model.model.split is not None:
        raise ValueError("model: expected one that context_parallel has not split, whose loss comes from its labels")
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    is_target = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if present is not None:
        is_target &= present[:, 1:].bool() & present[:, :-1].bool()
    if bounds is not None:
        starts = bounds[1:-1].to(ids.device, torch.long)
        is_target[0, starts[(starts > 0) & (starts < ids.shape[1])] - 1] = (
            False  # empty sequences begin at the ends too
        )
    return token_cross_entropies(
        hidden[:, :-1][is_target], ids[:, 1:][is_target], model.lm_head.weight, slice_size=slice_size
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

    Exact, in float32 at least, and without ever holding the logits of more than `slice_size` tokens. The student gets
    gradients, the teacher none.

    Args:
        teacher_hidden: last hidden states of the teacher, [N,hidden_size]; p comes from them.
        student_hidden: of the student, [N,hidden_size]; q.
        teacher_head: the teacher's map to logits, [vocab_size,hidden_size].
        student_head: the student's.
        slice_size: tokens at a time.
    """
    theirs, map_of_theirs = (_multiplied(x.detach()) for x in (teacher_hidden, teacher_head))

    def log_p(at: slice) -> Tensor:
        return wide(F.linear(theirs[at], map_of_theirs)).log_softmax(-1)

    return _behind_head(student_hidden, student_head, log_p, _divergences, slice_size)


def token_cross_entropies(hidden: Tensor, targets: Tensor, head: Tensor, *, slice_size: int = SLICE) -> Tensor:
    """The cross-entropy of each token's next one, [N], in nats, as `token_divergences` goes about it.

    Args:
        hidden: last hidden states, [N,hidden_size].
        targets: the next tokens, [N].
        head: the map to logits, [vocab_size,hidden_size].
        slice_size: tokens at a time.
    """
    return _behind_head(hidden, head, lambda at: targets[at], _cross_entropies, slice_size)


if TYPE_CHECKING:
    Targets = Callable[[slice], Tensor]
    Overwrite = Callable[[Tensor, Tensor], Tensor]
    """From logits [S,vocab_size] and their targets to losses [S]; leaves the losses' derivatives in the logits."""


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p of the targets [S]; ∂/∂logits is p − e_target."""
    right = logits.gather(1, targets[:, None])
    largest = logits.amax(-1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(-1, keepdim=True)
    logits.div_(total).scatter_add_(1, targets[:, None], torch.full_like(right, -1))
    return (largest + total.log() - right).squeeze(1)


def _divergences(logits: Tensor, log_p: Tensor) -> Tensor:
    """KL(p ‖ q) of logits of q; ∂/∂logits is q − p."""
    log_q, p = logits.sub_(logits.logsumexp(-1, keepdim=True)), log_p.exp()
    losses = (log_p.sub_(log_q).mul_(p)).sum(-1)
    log_q.exp_().sub_(p)
    return losses


def _behind_head(hidden: Tensor, head: Tensor, targets: Targets, losses_of: Overwrite, slice_size: int) -> Tensor:
    size = positive("slice_size", slice_size)
    if not len(hidden):
        raise ValueError("batch: expected at least one token to predict, got none")
    hidden, head = _multiplied(hidden), _multiplied(head)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _BehindHead.apply(hidden, head, targets, losses_of, size)
    with torch.no_grad():
        return torch.cat([losses for _, losses, _ in _slices(hidden, head, targets, losses_of, size)])


def _multiplied(x: Tensor) -> Tensor:
    """In the type in which autocast multiplies, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _slices(
    hidden: Tensor, head: Tensor, targets: Targets, losses_of: Overwrite, size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slice by slice: its place, its losses, and their derivatives by its logits, which the next slice overwrites."""
    logits = hidden.new_empty(min(size, len(hidden)), len(head))
    for start in range(0, len(hidden), size):
        at = slice(start, start + size)
        some = hidden[at]
        made = torch.mm(some, head.t(), out=logits[: len(some)])
        precise = wide(made)  # itself, unless it is of half precision
        losses = losses_of(precise, targets(at))
        yield at, losses, made if precise is made else made.copy_(precise)


class _BehindHead(torch.autograd.Function):
    """Losses of logits that are never all in memory; the forward pass computes gradients slice by slice.

    The gradient by the head is a sum over tokens, so it is made as if all losses counted the same, as they do in a
    mean. If it turns out that they do not, the logits are made once more.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Targets, losses_of: Overwrite, size: int) -> Tensor:
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = wide(torch.zeros_like(head)) if ctx.needs_input_grad[1] else None
        every_loss = []
        for at, losses, by_logits in _slices(hidden, head, targets, losses_of, size):
            every_loss.append(losses)
            if by_hidden is not None:
                torch.mm(by_logits, head, out=by_hidden[at])
            if by_head is not None:
                _add_product(by_head, by_logits, hidden[at])
        ctx.save_for_backward(hidden, head, by_hidden, by_head)
        ctx.again = targets, losses_of, size
        return torch.cat(every_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, head, by_hidden, by_head = ctx.saved_tensors
        if by_hidden is not None:
            by_hidden = (by_hidden * weights[:, None]).to(hidden.dtype)
        if by_head is not None:
            if bool((weights == weights[0]).all()):
                by_head = by_head * weights[0]
            else:
                by_head = torch.zeros_like(by_head)
                for at, _, by_logits in _slices(hidden, head, *ctx.again):
                    _add_product(by_head, by_logits.mul_(weights[at, None]), hidden[at])
            by_head = by_head.to(head.dtype)
        return by_hidden, by_head, None, None, None


def _add_product(total: Tensor, by_logits: Tensor, hidden: Tensor) -> None:
    """Add ∂/∂head of a slice to a total that is in float32 at least."""
    if total.dtype == hidden.dtype:
        total.addmm_(by_logits.t(), hidden)
    else:
        total.add_(by_logits.t() @ hidden)
