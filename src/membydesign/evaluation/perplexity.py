"""Perplexity by context length: windows side by side, every model cut at the same places."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from membydesign.evaluation.generation import batch_for
from membydesign.evaluation.tokens import check_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOGITS = 2**24
"""How many logits there may be at a time, 64 MiB of float32."""

TRIED = 64
"""Tokens on which a faster way must agree with the model's own logits."""


@final
@dataclass(frozen=True)
class Perplexity:
    r"""$\exp\big(-\tfrac{1}{W(L-1)} \sum_w \sum_{t=2}^{L} \log p(x_{w,t} \mid x_{w,<t})\big)$ of windows of L tokens.

    Attributes:
        length: L, tokens of a window.
        windows: W.
        cross_entropy: nats for each predicted token.
    """

    length: int
    windows: int
    cross_entropy: float

    @property
    def tokens(self) -> int:
        """Predicted tokens, L−1 for each window: its first has nothing before it."""
        return self.windows * (self.length - 1)

    @property
    def perplexity(self) -> float:
        """e to the cross-entropy; infinite where that is too large for a number."""
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return {
            "length": self.length,
            "perplexity": self.perplexity,
            "cross_entropy": self.cross_entropy,
            "tokens": self.tokens,
            "windows": self.windows,
        }


def windows_of(tokens: Tensor, length: int) -> Tensor:
    """A stream [N] as windows side by side, [N // L, L]; what is left at the end is no window."""
    if tokens.ndim != 1:
        raise ValueError(f"tokens: expected a stream, shape [N], got {list(tokens.shape)}")
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"length: expected a whole number of at least 2, got {length!r}")
    if len(tokens) < length:
        raise ValueError(f"length: expected at most the {len(tokens)} tokens that there are, got {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)


def perplexity(
    model: Any,
    tokens: Tensor,
    length: int,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity over windows of one length.

    Args:
        model: a causal language model of Transformers.
        tokens: a stream, [N].
        length: L.
        batch_size: windows at a time; as many as make 16,384 tokens if none is given.
        progress: told how many windows are done, of how many.
    """
    windows = windows_of(tokens, length)
    check_vocabulary(model, int(tokens.max()))
    model.eval()
    device = model.get_input_embeddings().weight.device
    losses = fastest_way(model, windows[:1].to(device))
    total, done = 0.0, 0
    for batch in windows.split(batch_for(length, batch_size)):
        total += float(losses(model, batch.to(device)).double().sum())
        done += len(batch)
        if progress is not None:
            progress(done, len(windows))
    return Perplexity(length, len(windows), total / (len(windows) * (length - 1)))


def perplexity_by_length(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Perplexity]:
    """`perplexity` of several lengths; windows of all lengths begin with the stream."""
    for length in lengths:
        windows_of(tokens, length)
    return [perplexity(model, tokens, length, batch_size=batch_size, progress=progress) for length in lengths]


# Three ways to the losses of next tokens, [B,L] to [B,L−1]


@torch.inference_mode()
def from_hidden_states(model: Any, ids: Tensor) -> Tensor:
    """The model without its head once, and the head on some tokens at a time; not all models are that simple."""
    out = model.base_model(input_ids=ids, use_cache=False)
    hidden, head = out[0], model.get_output_embeddings()
    return _in_pieces(lambda start, stop: head(hidden[:, start:stop]), ids, model)


@torch.inference_mode()
def from_kept_logits(model: Any, ids: Tensor) -> Tensor:
    """The whole model for each piece of its logits: any model with `logits_to_keep`, slower."""

    def logits(start: int, stop: int) -> Tensor:
        kept = torch.arange(start, stop, device=ids.device)
        return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits

    return _in_pieces(logits, ids, model)


@torch.inference_mode()
def from_all_logits(model: Any, ids: Tensor) -> Tensor:
    """All logits at once: any model, B·L·V numbers."""
    return _losses(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def fastest_way(model: Any, window: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """The first of the three ways that gives what the model itself gives.

    Models scale or bend their logits in ways of their own, so a way is tried on the beginning of a window, [1,L].
    """
    short = window[:, : min(TRIED, window.shape[1])]
    wanted = from_all_logits(model, short)
    close = 1e-3 if next(model.parameters()).dtype == torch.float32 else 3e-2
    ways: list[Callable[[Any, Tensor], Tensor]] = []
    if model.get_output_embeddings() is not None and model.base_model is not model:
        ways.append(from_hidden_states)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        ways.append(from_kept_logits)
    for way in ways:
        try:
            found = way(model, short)
        except (TypeError, RuntimeError, IndexError):  # made in a way of its own
            continue
        if found.shape == wanted.shape and torch.allclose(found, wanted, atol=close, rtol=close):
            return way
    return from_all_logits


def _in_pieces(logits: Callable[[int, int], Tensor], ids: Tensor, model: Any) -> Tensor:
    """Losses of some tokens at a time, so that no more than `LOGITS` logits are there at once."""
    B, L = ids.shape
    piece = max(1, LOGITS // (B * model.get_input_embeddings().weight.shape[0]))
    starts = range(0, L - 1, piece)
    return torch.cat(
        [_losses(logits(start, min(start + piece, L - 1)), ids[:, start + 1 : start + piece + 1]) for start in starts],
        1,
    )


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
