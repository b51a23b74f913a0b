r"""AR-hits: tokens that a model can predict from memory of the context, but not from frequency in its training text.

A predicted token $x_t$ completes the pair $(x_{t-1}, x_t)$. It is an AR-hit if the pair occurred at most $d$ tokens
earlier in the same window and is rare in the training text, so that the model can hardly have memorised it:

$$ x_t \text{ is a hit} \iff \exists\, s < t,\ t - s \le d:\ (x_{s-1}, x_s) = (x_{t-1}, x_t)
   \quad\text{and}\quad \mathrm{count}(x_{t-1}, x_t) \le c. $$

Zoology (Arora et al. 2024) with the paper's numbers: $d = 1{,}024$, and $c = 16$ for 130 million tokens of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.data.bigrams import Bigrams

DISTANCE = 1024
"""Maximum distance d to the earlier occurrence of a pair."""

RARE, PER_TOKENS = 1250, 10**10
"""Zoology's rate: pairs that occur up to 1,250 times in 10 billion tokens are rare."""

DISTANCES = ((1, 64), (65, 256), (257, 1024))
"""First and last distance of each group in the paper's table."""


def rarity_threshold(tokens: int) -> int:
    r"""Return the maximum count of a rare pair in n training tokens, $c = \lfloor 1250\, n / 10^{10} \rfloor$.

    It is 16 for the paper's 130 million tokens. Below 8 million tokens it is 0: only pairs absent from the training
    text are rare, because a single occurrence already exceeds the rate. It is not rounded up to 1, which would count
    frequent pairs as rare.

    Examples:
        >>> [rarity_threshold(n) for n in (10**10, 130_000_000, 8_000_000, 7_999_999)]
        [1250, 16, 1, 0]
    """
    check_whole_number("tokens", tokens, 1)
    return RARE * tokens // PER_TOKENS


@final
@dataclass(frozen=True, eq=False)
class Hits:
    """AR-hits among the predicted tokens of windows.

    Attributes:
        mask: whether token t + 1 is a hit, booleans [N,L−1].
        distance: distance in tokens to the previous occurrence of its pair in the window; 0 if there is none, [N,L−1].
    """

    mask: Tensor
    distance: Tensor


@final
@dataclass(frozen=True)
class Slice:
    """Loss on a subset of the predicted tokens.

    Attributes:
        tokens: number of tokens.
        loss: mean loss in nats; None if there are no tokens.
    """

    tokens: int
    loss: float | None

    @property
    def perplexity(self) -> float | None:
        """Exponential of the mean loss; None if there are no tokens."""
        return None if self.loss is None else math.exp(self.loss) if self.loss < 700 else math.inf


def pair_distance(windows: Tensor) -> Tensor:
    """Compute the distance to the previous occurrence of each token's pair; 0 if there is none in the window.

    Args:
        windows: tokens, [N,L].

    Returns:
        Distances of tokens 2 to L, [N,L−1].
    """
    if windows.dim() != 2 or windows.shape[1] < 2 or windows.is_floating_point():
        raise ValueError(f"windows: expected tokens [N,L] with L of at least 2, got {list(windows.shape)}")
    if not windows.numel():
        return windows[:, 1:].to(torch.int64)
    windows = windows.to(torch.int64)
    keys = windows[:, :-1] * (windows.max() + 1) + windows[:, 1:]
    keys, place = keys.sort(dim=1, stable=True)  # equal pairs become neighbours, in text order
    between = torch.zeros_like(place)
    between[:, 1:] = torch.where(keys[:, 1:] == keys[:, :-1], place[:, 1:] - place[:, :-1], 0)
    return torch.empty_like(place).scatter_(1, place, between)


def ar_hits(windows: Tensor, bigrams: Bigrams, threshold: int | None = None, distance: int = DISTANCE) -> Hits:
    """Find the AR-hits among the predicted tokens of windows.

    A window may contain several documents. Pairs with BOS are treated like any others.

    Args:
        windows: tokens, [N,L].
        bigrams: pair counts of the training text, from the same tokenizer.
        threshold: maximum count c of a rare pair; None for `rarity_threshold` of the training text.
        distance: maximum distance d.
    """
    threshold = rarity_threshold(bigrams.tokens) if threshold is None else threshold
    check_whole_number("threshold", threshold, 0)
    check_whole_number("distance", distance, 1)
    distances = pair_distance(windows)
    mask = (distances > 0) & (distances <= distance)
    pairs = torch.stack((windows[:, :-1], windows[:, 1:]), -1)
    # Look up repeated pairs only: the others are no hits, however rare.
    mask[mask.clone()] = bigrams.counts(pairs[mask]) <= threshold
    return Hits(mask, distances)


def slices(hits: Hits, losses: Tensor) -> dict[str, Slice]:
    """Average losses over all predicted tokens, AR-hits, other tokens, and AR-hits by distance.

    Args:
        hits: AR-hits of the windows.
        losses: cross-entropies in nats, [N,L−1].

    Returns:
        "overall", "hit", "other", "hit 1–64", "hit 65–256" and "hit 257–1,024".
    """
    if losses.shape != hits.mask.shape:
        raise ValueError(f"losses: expected {list(hits.mask.shape)}, as hits, got {list(losses.shape)}")
    bad = int((~losses.isfinite()).sum())
    if bad:
        raise ValueError(f"losses: expected finite losses, got {bad} that are not")
    masks = {"overall": torch.ones_like(hits.mask), "hit": hits.mask, "other": ~hits.mask}
    for first, last in DISTANCES:
        near = (hits.distance >= first) & (hits.distance <= last)
        masks[f"hit {first:,}–{last:,}"] = hits.mask & near
    losses = losses.detach().to(torch.float64)
    return {name: _slice(losses[mask.to(losses.device)]) for name, mask in masks.items()}


def _slice(losses: Tensor) -> Slice:
    return Slice(losses.numel(), losses.mean().item() if losses.numel() else None)
