r"""AR-hits: tokens of a text that a memory could know, and that frequency could not tell.

A predicted token $x_t$ completes the pair $(x_{t-1}, x_t)$. It is an AR-hit if the pair was last seen at most $d$
tokens before in the same window, and if it is rare in the training text, so that a model has hardly learned it by
heart:

$$ x_t \text{ is a hit} \iff \exists\, s < t,\ t - s \le d:\ (x_{s-1}, x_s) = (x_{t-1}, x_t)
   \quad\text{and}\quad \mathrm{count}(x_{t-1}, x_t) \le c. $$

Zoology (Arora et al. 2024) with the paper's numbers: $d = 1{,}024$, and $c = 16$ for 130 million tokens of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from membydesign.data.mqar import check_whole

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.data.bigrams import Bigrams

DISTANCE = 1024
"""How far back a pair may have been, d."""

RARE, PER_TOKENS = 1250, 10**10
"""Zoology's rate: pairs that occur up to 1,250 times in 10 billion tokens are rare."""

DISTANCES = ((1, 64), (65, 256), (257, 1024))
"""The distances of the paper's table, first and last."""


def rarity_threshold(tokens: int) -> int:
    r"""The most often that a rare pair occurs in a training text of n tokens, $c = \lfloor 1250\, n / 10^{10} \rfloor$.

    16 for the paper's 130 million tokens. Below 8 million tokens it is 0: only pairs that the training text does not
    have at all are rare, since one that it has even once is more frequent there than the rate allows. It is not raised
    to 1, which would call pairs rare that are not.

    >>> [rarity_threshold(n) for n in (10**10, 130_000_000, 8_000_000, 7_999_999)]
    [1250, 16, 1, 0]
    """
    check_whole("tokens", tokens, 1)
    return RARE * tokens // PER_TOKENS


@final
@dataclass(frozen=True, eq=False)
class Hits:
    """Which predicted tokens of windows are AR-hits.

    Attributes:
        mask: whether token t + 1 is a hit, [N,L−1] of booleans.
        distance: how many tokens before its pair was last in the window; 0 if it was not, [N,L−1].
    """

    mask: Tensor
    distance: Tensor


@final
@dataclass(frozen=True)
class Slice:
    """A part of the predicted tokens.

    Attributes:
        tokens: how many.
        loss: their mean loss in nats; None if there are none.
    """

    tokens: int
    loss: float | None

    @property
    def perplexity(self) -> float | None:
        """exp of the mean loss; None if there are no tokens."""
        return None if self.loss is None else math.exp(self.loss) if self.loss < 700 else math.inf


def pair_distance(windows: Tensor) -> Tensor:
    """How many tokens before a predicted token its pair was last; 0 if it was not before in the window.

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
    keys, place = keys.sort(dim=1, stable=True)  # equal pairs side by side, in the order of the text
    between = torch.zeros_like(place)
    between[:, 1:] = torch.where(keys[:, 1:] == keys[:, :-1], place[:, 1:] - place[:, :-1], 0)
    return torch.empty_like(place).scatter_(1, place, between)


def ar_hits(windows: Tensor, bigrams: Bigrams, threshold: int | None = None, distance: int = DISTANCE) -> Hits:
    """Label the predicted tokens of windows.

    A window may hold several documents. Pairs with BOS are treated like any others.

    Args:
        windows: tokens, [N,L].
        bigrams: the pairs of the training text, in the same tokenizer's tokens.
        threshold: c; None for `rarity_threshold` of that text.
        distance: d.
    """
    threshold = rarity_threshold(bigrams.tokens) if threshold is None else threshold
    check_whole("threshold", threshold, 0)
    check_whole("distance", distance, 1)
    found = pair_distance(windows)
    mask = (found > 0) & (found <= distance)
    pairs = torch.stack((windows[:, :-1], windows[:, 1:]), -1)
    # Only pairs that came before are looked up: others are no hits however rare.
    mask[mask.clone()] = bigrams.counts(pairs[mask]) <= threshold
    return Hits(mask, found)


def slices(hits: Hits, losses: Tensor) -> dict[str, Slice]:
    """Losses of all predicted tokens, of AR-hits and of the others, and of AR-hits by distance.

    Args:
        hits: of the windows.
        losses: cross-entropies in nats, [N,L−1].

    Returns:
        "overall", "hit", "other", "hit 1–64", "hit 65–256" and "hit 257–1,024".
    """
    if losses.shape != hits.mask.shape:
        raise ValueError(f"losses: expected {list(hits.mask.shape)}, as hits, got {list(losses.shape)}")
    bad = int((~losses.isfinite()).sum())
    if bad:
        raise ValueError(f"losses: expected finite ones, got {bad} that are not")
    masks = {"overall": torch.ones_like(hits.mask), "hit": hits.mask, "other": ~hits.mask}
    for first, last in DISTANCES:
        near = (hits.distance >= first) & (hits.distance <= last)
        masks[f"hit {first:,}–{last:,}"] = hits.mask & near
    losses = losses.detach().to(torch.float64)
    return {name: _slice(losses[mask.to(losses.device)]) for name, mask in masks.items()}


def _slice(losses: Tensor) -> Slice:
    return Slice(losses.numel(), losses.mean().item() if losses.numel() else None)
