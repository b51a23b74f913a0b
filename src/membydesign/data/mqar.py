r"""Multi-query associative recall (MQAR): show key-value pairs of tokens, then query every key.

The context holds $D$ keys, each with its value, and optionally $U$ rewrites. Filler tokens follow, among which every
key appears once as a query. The label is at the query's own position, and the value never follows it:

    inputs   A  4  B  5  A  7  0  0  A  0  B  0
    labels   .  .  .  .  .  .  .  .  7  .  5  .

Zoology's benchmark (Arora et al. 2024) with the paper's changes: one vocabulary for keys and values, permuted
independently for every sequence, rewrites (Update-MQAR) and blocks of keys before their values (Block-MQAR).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from membydesign.data.seeds import generator
from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FILLER = 0
"""Token between queries; neither a key nor a value."""

NO_LABEL = -100
"""Label of positions without a query, which losses ignore."""

BLOCK_SIZE = 1000
"""Number of examples generated at a time; each block has its own random stream."""


@final
@dataclass(frozen=True, eq=False)
class Examples:
    """N sequences of length L.

    Attributes:
        input_ids: tokens, [N,L].
        labels: newest value of the queried key, at the query's own position; −100 elsewhere, [N,L].
        rewrites: number of times the queried key was rewritten, at the query's position; −1 elsewhere, [N,L].
    """

    input_ids: Tensor
    labels: Tensor
    rewrites: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice | Tensor) -> Examples:
        """Select examples by a slice or a tensor of indices [n]."""
        return Examples(self.input_ids[rows], self.labels[rows], self.rewrites[rows])

    @property
    def queried(self) -> Tensor:
        """Boolean mask of query positions, [N,L]."""
        return self.labels != NO_LABEL

    def to(self, *args: Any, **options: Any) -> Examples:
        """Convert all tensors; takes the arguments of `torch.Tensor.to`."""
        return Examples(
            self.input_ids.to(*args, **options), self.labels.to(*args, **options), self.rewrites.to(*args, **options)
        )


def joined(parts: Sequence[Examples]) -> Examples:
    """Concatenate examples of the same length."""
    return Examples(
        torch.cat([part.input_ids for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.rewrites for part in parts]),
    )


def query_slots(length: int, pairs: int, updates: int = 0) -> int:
    """Number of possible query positions: every other position after a context of 2(D+U) tokens."""
    return max(length - 2 * (pairs + updates), 0) // 2


def fits(length: int, pairs: int, updates: int = 0) -> bool:
    """Whether D pairs, U rewrites and one query per key fit into L tokens: 4D + 2U ≤ L."""
    return pairs <= query_slots(length, pairs, updates)


@final
@dataclass(frozen=True)
class MQAR:
    r"""One kind of MQAR example.

    Query $d$ is at position $c + 2 g_d$ after a context of $c = 2(D+U)$ tokens. The gaps $g_1, \dots, g_D$ are drawn
    sequentially without replacement from $0, \dots, (L-c)/2 - 1$ with $p(g) \propto a (g+1)^{a-1}$.

    Attributes:
        length: sequence length L.
        pairs: number of keys D of a sequence; keys are distinct, and each is queried once.
        updates: number of rewrites U after the D first writes, each of a key drawn uniformly with replacement. All D+U
            values are distinct, so that a rewrite always changes the right answer.
        block: block size B: B keys precede their B values, D/B times. With 1 every key is next to its value.
        vocab_size: vocabulary size V, including the filler 0.
        power: exponent a of the gap distribution; 1 spreads queries evenly, near 0 they crowd after the context.
        shared_vocabulary: draw keys and values independently from 1, …, V−1. Otherwise use Zoology's halves: keys from
            1, …, V/2−1 and values from V/2, …, V−1.
    """

    length: int
    pairs: int
    updates: int = 0
    block: int = 1
    vocab_size: int = 8192
    power: float = 0.01
    shared_vocabulary: bool = True

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("pairs", 1), ("updates", 0), ("block", 1), ("vocab_size", 2)):
            check_whole_number(name, getattr(self, name), least)
        number = isinstance(self.power, (int, float)) and not isinstance(self.power, bool)
        if not number or not 0 < self.power < math.inf:
            raise ValueError(f"power: expected a number above 0, got {self.power!r}")
        if not isinstance(self.shared_vocabulary, bool):
            raise ValueError(f"shared_vocabulary: expected True or False, got {self.shared_vocabulary!r}")
        if not fits(self.length, self.pairs, self.updates):
            raise ValueError(
                f"length: expected at least 4·pairs + 2·updates = {4 * self.pairs + 2 * self.updates} "
                f"for pairs={self.pairs} and updates={self.updates}, got {self.length}"
            )
        if self.pairs % self.block:
            raise ValueError(f"block: expected a divisor of pairs={self.pairs}, got {self.block}")
        if self.updates and self.block > 1:
            raise ValueError(f"updates: expected 0 with block={self.block}, got {self.updates}")
        (_, keys), (_, values) = self.token_ranges
        if keys < self.pairs or values < self.writes:
            raise ValueError(
                f"vocab_size: expected at least {self.pairs} tokens for keys and {self.writes} for values, "
                f"got {self.vocab_size}, with {keys} and {values}"
            )

    @property
    def writes(self) -> int:
        """Number of writes of a sequence, D + U."""
        return self.pairs + self.updates

    @property
    def token_ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First token and number of tokens, for keys and for values."""
        if self.shared_vocabulary:
            return (1, self.vocab_size - 1), (1, self.vocab_size - 1)
        half = self.vocab_size // 2
        return (1, half - 1), (half, self.vocab_size - half)

    @property
    def name(self) -> str:
        """Identifier of the kind; it also names its random streams."""
        vocabulary = "V" if self.shared_vocabulary else "halves-of-V"
        sizes = f"L{self.length}-D{self.pairs}-U{self.updates}-B{self.block}"
        return f"mqar-{sizes}-{vocabulary}{self.vocab_size}-a{float(self.power)}"

    def sample(self, examples: int, *path: str | int) -> Examples:
        """Generate the examples of a named stream, for example `sample(1000, "train", seed)`.

        A longer sample of a stream begins with the shorter ones. Different paths or kinds never share a stream.

        Args:
            examples: number of examples N.
            path: name of the stream.
        """
        check_whole_number("examples", examples, 1)
        blocks = [self.sample_block(b, *path) for b in range(math.ceil(examples / BLOCK_SIZE))]
        return joined(blocks)[:examples]

    def sample_block(self, index: int, *path: str | int) -> Examples:
        """Generate examples 1,000·index to 1,000·index + 999 of a stream, independently of the others."""
        check_whole_number("index", index, 0)
        source = generator(self.name, *path, index)
        (first_key, key_count), (first_value, value_count) = self.token_ranges
        with torch.device("cpu"):  # the examples must not depend on the default device
            keys = first_key + draw_distinct(BLOCK_SIZE, self.pairs, key_count, source)
            values = first_value + draw_distinct(BLOCK_SIZE, self.writes, value_count, source)
            rewritten = torch.randint(self.pairs, (BLOCK_SIZE, self.updates), generator=source)
            return self._write(keys, values, rewritten, self._draw_gaps(BLOCK_SIZE, source))

    def _draw_gaps(self, examples: int, source: torch.Generator) -> Tensor:
        """Draw gaps without replacement, in order, [N,D]: a race of exponentials with rates p(i)."""
        slots = torch.arange(1, query_slots(self.length, self.pairs, self.updates) + 1, dtype=torch.float64)
        uniform = torch.rand(examples, len(slots), dtype=torch.float64, generator=source)
        arrival = -torch.log1p(-uniform) / slots ** (self.power - 1)
        return arrival.topk(self.pairs, largest=False, sorted=True).indices

    def _write(self, keys: Tensor, values: Tensor, rewritten: Tensor, gaps: Tensor) -> Examples:
        """Assemble sequences from keys [N,D], values [N,D+U], indices of rewritten keys [N,U] and gaps [N,D]."""
        N, D, U = len(keys), self.pairs, self.updates
        written = torch.cat((torch.arange(D).expand(N, D), rewritten), 1)
        pairs = torch.stack((keys.gather(1, written), values), -1)
        context = pairs.view(N, -1, self.block, 2).transpose(2, 3).reshape(N, -1)

        # A key's newest value comes from the last write to it.
        newest = torch.arange(D).repeat(N, 1)
        newest.scatter_reduce_(1, rewritten, torch.arange(D, D + U).expand(N, U), "amax")
        times = torch.zeros_like(newest).scatter_add_(1, rewritten, torch.ones_like(rewritten))

        queries = context.shape[1] + 2 * gaps
        input_ids = torch.full((N, self.length), FILLER)
        input_ids[:, : context.shape[1]] = context
        return Examples(
            input_ids.scatter_(1, queries, keys),
            torch.full_like(input_ids, NO_LABEL).scatter_(1, queries, values.gather(1, newest)),
            torch.full_like(input_ids, -1).scatter_(1, queries, times),
        )


def draw_distinct(rows: int, count: int, pool: int, source: torch.Generator) -> Tensor:
    """Draw integers below `pool`, distinct within a row and uniformly ordered, [rows,count]."""
    # 2⁶² is so much larger than `pool` that the remainders are uniform for all practical purposes.
    left = pool - torch.arange(count)
    return without_taken(torch.randint(2**62, (rows, count), generator=source) % left)


def without_taken(ranks: Tensor) -> Tensor:
    """Convert ranks among the numbers that earlier columns left over into those numbers, [N,n] to [N,n]."""
    numbers = ranks.T.contiguous()
    for i in range(len(numbers) - 2, -1, -1):
        later = numbers[i + 1 :]
        later += later >= numbers[i]
    return numbers.T.contiguous()
