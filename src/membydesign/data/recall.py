r"""Sequences of addressed writes followed by queries: controlled collisions, and random keys.

A token is $[\texttt{type}, \bar k, v]$: a write carries an address and a one-hot value, a query an address only. The
addresses that memories use are returned separately, so that no learned projection can change their overlaps.
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
"""First entry of a token: its type."""


class Addressed(NamedTuple):
    """A batch of sequences; the last Q tokens are queries.

    Attributes:
        tokens: token vectors, [B,T,1+A+L], with A the address size inside a token and L the number of labels.
        addresses: unit vectors that memories use as keys and queries, [B,T,D].
        answers: correct labels, [B,Q].
        rivals: labels of the colliding distractors, [B,Q]; empty, [B,0], if there are none.
    """

    tokens: Tensor
    addresses: Tensor
    answers: Tensor
    rivals: Tensor


@dataclass(frozen=True)
class Collisions:
    r"""K pairs of a target B and a distractor A with $\bar k_A^\top \bar k_B = \rho$; different pairs are orthogonal.

    A sequence has four phases: every identity once, in random order; every target $n_b$ times; every distractor $n_f$
    times; then one query per target, in random order.

    Attributes:
        pairs: number of pairs K.
        target_writes: number of writes $n_b$ of each target.
    """

    pairs: int = 8
    target_writes: int = 4

    @property
    def address_dim(self) -> int:
        """Address size, D = 2K."""
        return 2 * self.pairs

    @property
    def labels(self) -> int:
        """Number of labels, 2K: one per identity."""
        return 2 * self.pairs

    @property
    def token_dim(self) -> int:
        """Token size: type, address, value."""
        return 1 + self.address_dim + self.labels

    def sample(self, examples: int, distractor_writes: int, overlap: tuple[float, float], rng: Generator) -> Addressed:
        r"""Draw sequences.

        Args:
            examples: batch size B.
            distractor_writes: number of writes $n_f$ of each distractor, the same for the whole batch.
            overlap: bounds between which each pair's ρ is uniform.
            rng: random generator.
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
        queried = 2 * torch.rand(B, K, generator=rng).argsort(1)
        identities = torch.cat([seeds, writes.expand(B, -1), queried], 1)
        answers, rivals = labels.gather(1, queried), labels.gather(1, queried + 1)
        return Addressed(*_tokens(keys, labels, identities, K, self.labels), answers, rivals)


@dataclass(frozen=True)
class RandomKeys:
    r"""n writes at random addresses, then queries for some of them.

    Addresses are uniform on the unit sphere of dimension A. Memories see them through a frozen projection to dimension
    D with orthonormal rows, renormalised. Labels are drawn independently for every write.

    Attributes:
        raw_dim: address size A inside a token.
        address_dim: address size D as memories see it.
        labels: number of labels.
        queries: queries per sequence, each for a different write.
        projection_seed: random seed of the projection, which all models share.
    """

    raw_dim: int = 64
    address_dim: int = 16
    labels: int = 64
    queries: int = 8
    projection_seed: int = 0

    @property
    def token_dim(self) -> int:
        """Token size: type, address, value."""
        return 1 + self.raw_dim + self.labels

    def projection(self) -> Tensor:
        """Return the projection R with orthonormal rows, [D,A]."""
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
        queried = torch.rand(B, writes, generator=rng).argsort(1)[:, : self.queries]
        identities = torch.cat([torch.arange(writes).expand(B, -1), queried], 1)
        tokens, raw_addresses = _tokens(raw, labels, identities, self.queries, self.labels)
        addresses = F.normalize(raw_addresses @ self.projection().T, dim=-1)
        return Addressed(tokens, addresses, labels.gather(1, queried), labels[:, :0])


def _tokens(keys: Tensor, labels: Tensor, identities: Tensor, queries: int, count: int) -> tuple[Tensor, Tensor]:
    """Build tokens and addresses for sequences of identities whose last ones are queries."""
    addresses = keys.gather(1, identities[..., None].expand(-1, -1, keys.shape[-1]))
    values = F.one_hot(labels.gather(1, identities), count).to(keys.dtype)
    kind = torch.full((*identities.shape, 1), WRITE)
    kind[:, -queries:], values[:, -queries:] = QUERY, 0.0
    return torch.cat([kind, addresses, values], -1), addresses


def overlap_statistics(addresses: Tensor) -> dict[str, float]:
    """Measure how much unit addresses [B,n,D] overlap: over all pairs, and each address with its closest other one.

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
