r"""Multi-query associative recall: pairs of tokens are shown, then keys are asked for.

A context of $D$ keys, each with its value, and perhaps $U$ rewrites; then fillers, among which every key comes back
once. The label stands at the query itself, and the value is never shown after it:

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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FILLER = 0
"""The token between queries; it is neither a key nor a value."""

NO_LABEL = -100
"""The label of a position at which nothing is asked, which losses leave out."""

BLOCK_SIZE = 1000
"""Examples are made so many at a time, each block from a random stream of its own."""


@final
@dataclass(frozen=True, eq=False)
class Examples:
    """N sequences of length L.

    Attributes:
        input_ids: tokens, [N,L].
        labels: the newest value of the key asked for, at the query's own position; −100 elsewhere, [N,L].
        rewrites: how often the key asked for was rewritten, at the query's position; −1 elsewhere, [N,L].
    """

    input_ids: Tensor
    labels: Tensor
    rewrites: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice | Tensor) -> Examples:
        """The examples of a slice, or of a tensor of indices [n]."""
        return Examples(self.input_ids[rows], self.labels[rows], self.rewrites[rows])

    @property
    def asked(self) -> Tensor:
        """Where a key is asked for, [N,L] of booleans."""
        return self.labels != NO_LABEL

    def to(self, *args: Any, **options: Any) -> Examples:
        """The same examples elsewhere or of another type; arguments as of `torch.Tensor.to`."""
        return Examples(
            self.input_ids.to(*args, **options), self.labels.to(*args, **options), self.rewrites.to(*args, **options)
        )


def joined(parts: Sequence[Examples]) -> Examples:
    """Examples of one length, one part after another."""
    return Examples(
        torch.cat([part.input_ids for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.rewrites for part in parts]),
    )


def query_slots(length: int, pairs: int, updates: int = 0) -> int:
    """Positions at which a query may stand: every other one after a context of 2(D+U) tokens."""
    return max(length - 2 * (pairs + updates), 0) // 2


def fits(length: int, pairs: int, updates: int = 0) -> bool:
    """Whether L tokens have room for D pairs, U rewrites and one query for every key: 4D + 2U ≤ L."""
    return pairs <= query_slots(length, pairs, updates)


@final
@dataclass(frozen=True)
class MQAR:
    r"""One kind of example.

    Query $d$ stands at position $c + 2 g_d$ after a context of $c = 2(D+U)$ tokens. The gaps $g_1, \dots, g_D$ are
    drawn one after another, without replacement, from $0, \dots, (L-c)/2 - 1$ with $p(g) \propto a (g+1)^{a-1}$.

    Attributes:
        length: L.
        pairs: D, keys of a sequence; all are different, and each is asked for once.
        updates: U, rewrites after the D first writes, each of a key drawn uniformly with replacement. All D+U values
            are different, so that a rewrite always changes what is right.
        block: B; B keys come before their B values, D/B times. With 1 every key is next to its value.
        vocab_size: V, tokens with the filler 0.
        power: a; 1 spreads queries evenly, and near 0 they crowd after the context.
        shared_vocabulary: keys and values both from 1, …, V−1, drawn independently. Otherwise Zoology's halves: keys
            from 1, …, V/2−1 and values from V/2, …, V−1.
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
            check_whole(name, getattr(self, name), least)
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
        """D + U, the writes of a sequence."""
        return self.pairs + self.updates

    @property
    def token_ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The first token and the number of tokens, of keys and of values."""
        if self.shared_vocabulary:
            return (1, self.vocab_size - 1), (1, self.vocab_size - 1)
        half = self.vocab_size // 2
        return (1, half - 1), (half, self.vocab_size - half)

    @property
    def name(self) -> str:
        """What it is in one word, which also names its random streams."""
        vocabulary = "V" if self.shared_vocabulary else "halves-of-V"
        sizes = f"L{self.length}-D{self.pairs}-U{self.updates}-B{self.block}"
        return f"mqar-{sizes}-{vocabulary}{self.vocab_size}-a{float(self.power)}"

    def sample(self, examples: int, *path: str | int) -> Examples:
        """Examples of the stream of a path, for example `sample(1000, "train", seed)`.

        More examples of a stream begin with the fewer ones, and different paths or kinds share no stream.

        Args:
            examples: N.
            path: the name of the stream.
        """
        check_whole("examples", examples, 1)
        blocks = [self.sample_block(b, *path) for b in range(math.ceil(examples / BLOCK_SIZE))]
        return joined(blocks)[:examples]

    def sample_block(self, index: int, *path: str | int) -> Examples:
        """Examples 1,000·index to 1,000·index + 999 of a stream, whoever makes the others."""
        check_whole("index", index, 0)
        source = generator(self.name, *path, index)
        (first_key, key_count), (first_value, value_count) = self.token_ranges
        with torch.device("cpu"):  # the same examples whatever the default device is
            keys = first_key + draw_distinct(BLOCK_SIZE, self.pairs, key_count, source)
            values = first_value + draw_distinct(BLOCK_SIZE, self.writes, value_count, source)
            rewritten = torch.randint(self.pairs, (BLOCK_SIZE, self.updates), generator=source)
            return self._write(keys, values, rewritten, self._draw_gaps(BLOCK_SIZE, source))

    def _draw_gaps(self, examples: int, source: torch.Generator) -> Tensor:
        """Weighted draws without replacement, in their order, [N,D]: a race of exponentials with rates p(i)."""
        slots = torch.arange(1, query_slots(self.length, self.pairs, self.updates) + 1, dtype=torch.float64)
        uniform = torch.rand(examples, len(slots), dtype=torch.float64, generator=source)
        arrival = -torch.log1p(-uniform) / slots ** (self.power - 1)
        return arrival.topk(self.pairs, largest=False, sorted=True).indices

    def _write(self, keys: Tensor, values: Tensor, rewritten: Tensor, gaps: Tensor) -> Examples:
        """The sequences of keys [N,D], values [N,D+U], indices of rewritten keys [N,U] and gaps [N,D]."""
        N, D, U = len(keys), self.pairs, self.updates
        written = torch.cat((torch.arange(D).expand(N, D), rewritten), 1)
        pairs = torch.stack((keys.gather(1, written), values), -1)
        context = pairs.view(N, -1, self.block, 2).transpose(2, 3).reshape(N, -1)

        # A key's newest value is that of the last write that names it.
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
    """Numbers below `pool`, all different within a row and in every order equally likely, [rows,count]."""
    # 2⁶² is so far above `pool` that its remainders are uniform for every purpose.
    left = pool - torch.arange(count)
    return without_taken(torch.randint(2**62, (rows, count), generator=source) % left)


def without_taken(ranks: Tensor) -> Tensor:
    """The numbers whose ranks, among those that no earlier column took, are given: [N,n] from [N,n]."""
    numbers = ranks.T.contiguous()
    for i in range(len(numbers) - 2, -1, -1):
        later = numbers[i + 1 :]
        later += later >= numbers[i]
    return numbers.T.contiguous()


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
