r"""Sequences of addressed writes, then queries: controlled collisions, and random keys.

A token is $[\texttt{type}, \bar k, v]$: a write carries an address and a one-hot value, a query an address alone. The
addresses that memories use stand beside the tokens, so that no learned projection can change how they overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from membydesign.data.seeds import generator

if TYPE_CHECKING:
    from torch import Generator, Tensor

WRITE, QUERY = 0.0, 1.0
"""The type of a token, its first entry."""


class Addressed(NamedTuple):
    """A batch of sequences; the last Q tokens are queries.

    Attributes:
        tokens: [B,T,1+A+L] with A the size of an address as the token shows it and L the number of labels.
        addresses: unit vectors, as memories see them, [B,T,D].
        answers: the right labels, [B,Q].
        rivals: the labels of the colliding distractors, [B,Q]; empty, [B,0], where there are none.
    """

    tokens: Tensor
    addresses: Tensor
    answers: Tensor
    rivals: Tensor


@dataclass(frozen=True)
class Collisions:
    r"""K pairs of a target B and a distractor A with $\bar k_A^\top \bar k_B = \rho$; different pairs are orthogonal.

    Four phases: every identity once, in random order; every target $n_b$ times; every distractor $n_f$ times; then one
    query for each target, in random order.

    Attributes:
        pairs: K.
        target_writes: $n_b$.
    """

    pairs: int = 8
    target_writes: int = 4

    @property
    def address_dim(self) -> int:
        """D = 2K."""
        return 2 * self.pairs

    @property
    def labels(self) -> int:
        """2K, one for each identity."""
        return 2 * self.pairs

    @property
    def token_dim(self) -> int:
        """The size of a token: type, address, value."""
        return 1 + self.address_dim + self.labels

    def sample(self, examples: int, distractor_writes: int, overlap: tuple[float, float], rng: Generator) -> Addressed:
        r"""Draw sequences.

        Args:
            examples: B.
            distractor_writes: $n_f$, the same for the whole batch.
            overlap: each pair's ρ is uniform between the two.
            rng: where randomness comes from.
        """
        B, K = examples, self.pairs
        low, high = overlap
        if not 0 <= low <= high <= 1:
            raise ValueError(f"overlap: expected 0 <= low <= high <= 1, got {overlap}")
        rho = low + (high - low) * torch.rand(B, K, generator=rng)
        pair = torch.arange(K)
        keys = torch.zeros(B, 2 * K, 2 * K)  # identities 2i: target B_i, 2i+1: distractor A_i
        keys[:, 2 * pair, 2 * pair] = 1
        keys[:, 2 * pair + 1, 2 * pair] = rho
        keys[:, 2 * pair + 1, 2 * pair + 1] = (1 - rho**2).sqrt()
        labels = torch.rand(B, 2 * K, generator=rng).argsort(1)
        seeds = torch.rand(B, 2 * K, generator=rng).argsort(1)
        writes = torch.cat(
            [2 * pair.repeat_interleave(self.target_writes), 2 * pair.repeat_interleave(distractor_writes) + 1]
        )
        asked = 2 * torch.rand(B, K, generator=rng).argsort(1)
        identities = torch.cat([seeds, writes.expand(B, -1), asked], 1)
        answers = labels.gather(1, asked)
        return Addressed(*_tokens(keys, labels, identities, K, self.labels), answers, labels.gather(1, asked + 1))


@dataclass(frozen=True)
class RandomKeys:
    r"""n writes at random addresses, then queries for some of them.

    Addresses are uniform on the sphere of dimension A; memories see them through a frozen projection with orthonormal
    rows, renormalised, of dimension D. Labels are drawn independently for every write.

    Attributes:
        raw_dim: A.
        address_dim: D.
        labels: how many there are.
        queries: of each sequence, for different writes.
        projection_seed: of the projection, which all models share.
    """

    raw_dim: int = 64
    address_dim: int = 16
    labels: int = 64
    queries: int = 8
    projection_seed: int = 0

    @property
    def token_dim(self) -> int:
        """The size of a token: type, address, value."""
        return 1 + self.raw_dim + self.labels

    def projection(self) -> Tensor:
        """R, [D,A], with orthonormal rows."""
        gaussian = torch.randn(
            self.raw_dim,
            self.address_dim,
            dtype=torch.float64,
            generator=generator("random keys", "projection", self.projection_seed),
        )
        columns, upper = torch.linalg.qr(gaussian)
        return (columns * upper.diagonal().sign()).T.float()

    def sample(self, examples: int, writes: int, rng: Generator) -> Addressed:
        """Draw sequences with n = `writes`."""
        if writes < self.queries:
            raise ValueError(f"writes: expected at least the {self.queries} queries, got {writes}")
        B = examples
        raw = F.normalize(torch.randn(B, writes, self.raw_dim, generator=rng), dim=-1)
        labels = torch.randint(self.labels, (B, writes), generator=rng)
        asked = torch.rand(B, writes, generator=rng).argsort(1)[:, : self.queries]
        identities = torch.cat([torch.arange(writes).expand(B, -1), asked], 1)
        tokens, shown = _tokens(raw, labels, identities, self.queries, self.labels)
        addresses = F.normalize(shown @ self.projection().T, dim=-1)
        return Addressed(tokens, addresses, labels.gather(1, asked), labels[:, :0])


def _tokens(keys: Tensor, labels: Tensor, identities: Tensor, queries: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and addresses of a sequence of identities, the last of which are asked."""
    addresses = keys.gather(1, identities[..., None].expand(-1, -1, keys.shape[-1]))
    values = F.one_hot(labels.gather(1, identities), count).to(keys.dtype)
    kind = torch.full((*identities.shape, 1), WRITE)
    kind[:, -queries:], values[:, -queries:] = QUERY, 0.0
    return torch.cat([kind, addresses, values], -1), addresses


def overlap_statistics(addresses: Tensor) -> dict[str, float]:
    """How far unit addresses collide, [B,n,D]: the overlaps of all pairs, and each one's largest with another.

    For n independent uniform directions the mean square overlap of a pair is 1/D.
    """
    n, D = addresses.shape[-2:]
    gram = addresses @ addresses.mT
    others = ~torch.eye(n, dtype=torch.bool)
    pairs = gram[:, others]
    return {
        "n/D": n / D,
        "mean_square_overlap": pairs.square().mean().item(),
        "expected_mean_square_overlap": 1 / D,
        "mean_absolute_overlap": pairs.abs().mean().item(),
        "mean_largest_overlap": gram.masked_fill(~others, -math.inf).amax(-1).mean().item(),
    }
