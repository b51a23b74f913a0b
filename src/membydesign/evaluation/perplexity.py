"""Perplexity by context length, over non-overlapping windows that are the same for every model."""

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
"""Maximum number of logits in memory, 64 MiB in float32."""

TRIED = 64
"""Number of tokens on which a faster method must agree with the model's own logits."""


@final
@dataclass(frozen=True)
class Perplexity:
    r"""$\exp\big(-\tfrac{1}{W(L-1)} \sum_w \sum_{t=2}^{L} \log p(x_{w,t} \mid x_{w,<t})\big)$ of windows of L tokens.

    Attributes:
        length: tokens per window, L.
        windows: number of windows, W.
        cross_entropy: nats per predicted token.
    """

    length: int
    windows: int
    cross_entropy: float

    @property
    def tokens(self) -> int:
        """Number of predicted tokens: L−1 per window, all but the first."""
        return self.windows * (self.length - 1)

    @property
    def perplexity(self) -> float:
        """Exponential of the cross-entropy; infinite if it overflows."""
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary of plain numbers."""
        return {
            "length": self.length,
            "perplexity": self.perplexity,
            "cross_entropy": self.cross_entropy,
            "tokens": self.tokens,
            "windows": self.windows,
        }


def windows_of(tokens: Tensor, length: int) -> Tensor:
    """Divide a stream [N] into windows [N // L, L]; an incomplete last window is dropped."""
    if tokens.ndim != 1:
        raise ValueError(f"tokens: expected a stream, shape [N], got {list(tokens.shape)}")
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"length: expected a whole number of at least 2, got {length!r}")
    if len(tokens) < length:
        raise ValueError(f"length: expected at most the {len(tokens)} tokens of the text, got {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)


def perplexity(
    model: Any,
    tokens: Tensor,
    length: int,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure perplexity over windows of one length.

    Args:
        model: causal language model of Transformers.
        tokens: token stream, [N].
        length: window length L.
        batch_size: windows per batch; None for about 16,384 tokens per batch.
        progress: called with the number of windows done and the total.
    """
    windows = windows_of(tokens, length)
    check_vocabulary(model, int(tokens.max()))
    model.eval()
    device = model.get_input_embeddings().weight.device
    losses = fastest_method(model, windows[:1].to(device))
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
    """Measure `perplexity` for several lengths; windows of every length start at the beginning of the stream."""
    for length in lengths:
        windows_of(tokens, length)
    return [perplexity(model, tokens, length, batch_size=batch_size, progress=progress) for length in lengths]


# Three methods to compute next-token losses, [B,L] to [B,L−1]


@torch.inference_mode()
def from_hidden_states(model: Any, ids: Tensor) -> Tensor:
    """Run the model without its head once, then the head on a few tokens at a time; not valid for every model."""
    out = model.base_model(input_ids=ids, use_cache=False)
    hidden, head = out[0], model.get_output_embeddings()
    return _in_pieces(lambda start, stop: head(hidden[:, start:stop]), ids, model)


@torch.inference_mode()
def from_kept_logits(model: Any, ids: Tensor) -> Tensor:
    """Run the whole model for each piece of its logits: slower, for any model with `logits_to_keep`."""

    def logits(start: int, stop: int) -> Tensor:
        kept = torch.arange(start, stop, device=ids.device)
        return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits

    return _in_pieces(logits, ids, model)


@torch.inference_mode()
def from_all_logits(model: Any, ids: Tensor) -> Tensor:
    """Compute all logits at once: works for any model, needs B·L·V numbers."""
    return _losses(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def fastest_method(model: Any, window: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """Return the first of the three methods that reproduces the model's own losses.

    Some models scale or cap their logits, so each method is tried on the beginning of a window, [1,L].
    """
    short = window[:, : min(TRIED, window.shape[1])]
    expected = from_all_logits(model, short)
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 3e-2
    methods: list[Callable[[Any, Tensor], Tensor]] = []
    if model.get_output_embeddings() is not None and model.base_model is not model:
        methods.append(from_hidden_states)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        methods.append(from_kept_logits)
    for method in methods:
        try:
            losses = method(model, short)
        except (TypeError, RuntimeError, IndexError):  # the model is built differently
            continue
        if losses.shape == expected.shape and torch.allclose(losses, expected, atol=tolerance, rtol=tolerance):
            return method
    return from_all_logits


def _in_pieces(logits: Callable[[int, int], Tensor], ids: Tensor, model: Any) -> Tensor:
    """Compute losses piece by piece, with at most `LOGITS` logits in memory."""
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
