r"""Count adjacent token pairs of a stream: chunk by chunk, stored on disk, looked up by binary search.

A pair $(a, b)$ has the key $aV + b$. The keys of a chunk are sorted and equal neighbours are counted. Chunks are merged
as they arrive, as in a merge sort, so memory grows with the number of distinct pairs only.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

import torch

from membydesign.data.tensor_files import TensorFile, Writer, differences, read_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from membydesign.data.token_files import TokenFile

KIND = "bigrams"
VERSION = 1

CHUNK = 2**22
"""Number of pairs sorted at a time."""


@final
class Bigrams:
    """Pair counts, created by `count_bigrams`; they are read, and compared with their hash, when first needed.

    Args:
        path: file of counts.

    Attributes:
        header: file header: "vocab_size", V; "tokens", length of the stream; "stream", header of its token file.
    """

    def __init__(self, path: Path) -> None:
        self._tensors = TensorFile(path, KIND, ("keys", "numbers"))
        self.path, self.header = path, self._tensors.header
        mismatches = differences(self.header, {"version": VERSION, "pairs": len(self)})
        if self._tensors.length("numbers") != len(self):
            mismatches.append(f"it has {len(self)} keys and {self._tensors.length('numbers')} numbers")
        if mismatches:
            raise ValueError(
                f"path: expected counts of version {VERSION} in {path}, got others: {'; '.join(mismatches)}; "
                "count again"
            )
        for name in ("vocab_size", "tokens"):
            if type(self.header.get(name)) is not int or self.header[name] < 1:
                raise ValueError(f"path: expected a whole number as {name} of {path}, got {self.header.get(name)!r}")

    def __len__(self) -> int:
        """Number of distinct pairs."""
        return self._tensors.length("keys")

    @cached_property
    def keys(self) -> Tensor:
        """Sorted keys of the pairs that occur, [n]."""
        self._tensors.verify()
        return self._tensors.read("keys")

    @cached_property
    def numbers(self) -> Tensor:
        """Count of each pair, [n]."""
        self._tensors.verify()
        return self._tensors.read("numbers")

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, V."""
        return self.header["vocab_size"]

    @property
    def tokens(self) -> int:
        """Number of tokens in the counted stream."""
        return self.header["tokens"]

    def counts(self, pairs: Tensor) -> Tensor:
        """Look up how often pairs occur in the stream.

        Args:
            pairs: first and second tokens, [...,2].

        Returns:
            Counts, [...]; 0 for pairs that do not occur.
        """
        if pairs.shape[-1:] != (2,) or pairs.is_floating_point():
            raise ValueError(f"pairs: expected tokens [...,2], got {pairs.dtype} {list(pairs.shape)}")
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < self.vocab_size:
            raise ValueError(
                f"pairs: expected tokens from 0 to {self.vocab_size - 1}, "
                f"got {int(pairs.min())} to {int(pairs.max())}; do they come from another tokenizer?"
            )
        first, second = pairs.to("cpu", torch.int64).unbind(-1)
        return _look_up(self.keys, self.numbers, first * self.vocab_size + second).to(pairs.device)

    def check(self, tokens: TokenFile) -> None:
        """Raise an error unless these are the counts of a given stream."""
        if differences(self.header, {"stream": tokens.header}):
            raise ValueError(
                f"path: expected the counts of {tokens.path}, got those of another stream in {self.path}; count again"
            )


def count_bigrams(tokens: TokenFile, path: Path, *, watch: Callable[[int], None] = lambda _pairs: None) -> Bigrams:
    """Count all n − 1 adjacent pairs of a stream of n tokens, or load them if the file already has them.

    Pairs across document boundaries count too: (last token, BOS) and (BOS, first token).

    Args:
        tokens: token stream of the training split; never count the text that a model is tested on.
        path: file of counts. A file with other contents is never overwritten.
        watch: called after every chunk with the number of pairs counted so far.
    """
    V = tokens.vocab_size
    if V >= 2**31:
        raise ValueError(f"tokens: expected a vocabulary below 2^31, got {V}")
    if len(tokens) < 2:
        raise ValueError(f"tokens: expected at least two, got {len(tokens)} in {tokens.path}")
    header = {"kind": KIND, "version": VERSION, "vocab_size": V, "tokens": len(tokens), "stream": tokens.header}
    stored = read_header(path, KIND)
    if stored is not None and not differences(stored, header):
        return Bigrams(path)
    keys, numbers = _count(tokens, watch)
    with Writer(path, header) as file:
        file.add("keys", "I64", keys)
        file.add("numbers", "I64", numbers)
        file.done(pairs=len(keys))
    return Bigrams(path)


Counts = tuple["Tensor", "Tensor"]
"""Sorted distinct keys, and how often each occurs."""


def _count(tokens: TokenFile, watch: Callable[[int], None]) -> Counts:
    # Merge parts of similar size, as in a merge sort: each remaining part is at least twice as long as the next.
    done: list[Counts] = []
    for start in range(0, len(tokens) - 1, CHUNK):
        stream = tokens.read(start, min(start + CHUNK, len(tokens) - 1) + 1)
        done.append(_runs(_sorted(stream[:-1] * tokens.vocab_size + stream[1:])))
        while len(done) > 1 and len(done[-2][0]) < 2 * len(done[-1][0]):
            last = done.pop()
            done[-1] = merged(done[-1], last)
        watch(min(start + CHUNK, len(tokens) - 1))
    while len(done) > 1:
        last = done.pop()
        done[-1] = merged(done[-1], last)
    return done[0]


def _sorted(keys: Tensor) -> Tensor:
    """Return the sorted keys; may sort in place."""
    try:
        array = keys.numpy()
    except RuntimeError:  # torch without NumPy, whose sort is three times slower
        return keys.sort().values
    array.sort()
    return keys


def _runs(keys: Tensor) -> Counts:
    """Return the distinct keys of a sorted tensor and their counts."""
    ends = torch.cat(((keys[1:] != keys[:-1]).nonzero().squeeze(1), torch.tensor([len(keys) - 1])))
    return keys[ends], torch.diff(ends, prepend=torch.tensor([-1]))


def merged(a: Counts, b: Counts) -> Counts:
    """Add the counts of two streams."""
    (keys, numbers), (more, more_numbers) = a, b
    place = torch.searchsorted(keys, more)
    known = keys[place.clamp(max=len(keys) - 1)] == more
    numbers = numbers.clone()
    numbers[place[known]] += more_numbers[known]
    new = place[~known]
    # A new key comes after the smaller old keys and the smaller new keys.
    where = new + torch.arange(len(new))
    old = torch.ones(len(keys) + len(new), dtype=torch.bool)
    old[where] = False
    out, out_numbers = torch.empty(2, len(old), dtype=torch.int64)
    out[where], out_numbers[where] = more[~known], more_numbers[~known]
    out[old], out_numbers[old] = keys, numbers
    return out, out_numbers


def _look_up(keys: Tensor, numbers: Tensor, queries: Tensor) -> Tensor:
    place = torch.searchsorted(keys, queries).clamp_(max=len(keys) - 1)
    return torch.where(keys[place] == queries, numbers[place], 0)
