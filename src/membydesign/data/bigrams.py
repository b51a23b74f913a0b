r"""How often each pair of adjacent tokens occurs in a stream: counted by chunks, kept on disk, looked up by search.

A pair $(a, b)$ has the key $aV + b$. A chunk's keys are sorted, and equal neighbours counted; chunks are merged as they
come, like with like, so that the memory needed is that of the pairs that differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from membydesign.data.mapped import Writer, differences, read_header, read_mapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from membydesign.data.token_files import TokenFile

KIND = "bigrams"
VERSION = 1

CHUNK = 2**22
"""Pairs that are sorted at once."""


@final
class Bigrams:
    """Counts of pairs, mapped into memory; made by `count_bigrams`.

    Args:
        path: of the file.

    Attributes:
        header: what the file holds: "vocab_size", V; "tokens" of the stream; "stream", the header of its token file.
        keys: of the pairs that occur, in order, [n].
        numbers: how often each does, [n].
    """

    def __init__(self, path: Path) -> None:
        mapped = read_mapped(path, KIND)
        found = differences(mapped.header, {"version": VERSION})
        if found:
            raise ValueError(f"path: expected other counts than {path}: {'; '.join(found)}; count anew")
        self.path, self.header = path, mapped.header
        self.keys, self.numbers = mapped.tensors["keys"], mapped.tensors["numbers"]

    def __len__(self) -> int:
        """Pairs that differ."""
        return len(self.keys)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.header["vocab_size"]

    @property
    def tokens(self) -> int:
        """Tokens of the stream that was counted."""
        return self.header["tokens"]

    def counts(self, pairs: Tensor) -> Tensor:
        """How often pairs occur in the stream.

        Args:
            pairs: first and second tokens, [...,2].

        Returns:
            Their counts, 0 for those that do not occur, [...].
        """
        if pairs.shape[-1:] != (2,) or pairs.is_floating_point():
            raise ValueError(f"pairs: expected tokens [...,2], got {pairs.dtype} {list(pairs.shape)}")
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < self.vocab_size:
            raise ValueError(
                f"pairs: expected tokens from 0 to {self.vocab_size - 1}, "
                f"got ones from {int(pairs.min())} to {int(pairs.max())}; are they of another tokenizer?"
            )
        first, second = pairs.to("cpu", torch.int64).unbind(-1)
        return _look_up(self.keys, self.numbers, first * self.vocab_size + second).to(pairs.device)

    def check(self, tokens: TokenFile) -> None:
        """Refuse the counts of another stream."""
        found = differences(self.header, {"stream": tokens.header})
        if found:
            raise ValueError(f"path: expected the counts of {tokens.path}, and {self.path} has others; count anew")


def count_bigrams(tokens: TokenFile, path: Path, *, watch: Callable[[int], None] = lambda _pairs: None) -> Bigrams:
    """The counts of all adjacent pairs of a stream of n tokens, n − 1 in all; counted if they are not there.

    Pairs at a document's beginning count like any others: (last token, BOS) and (BOS, first token).

    Args:
        tokens: the stream, of the training split: what is tested on must not be counted.
        path: of the file of counts. A file of something else is not replaced.
        watch: called with the pairs counted so far, chunk by chunk.
    """
    V = tokens.vocab_size
    if V >= 2**31:
        raise ValueError(f"tokens: expected a vocabulary below 2^31, got {V}")
    if len(tokens) < 2:
        raise ValueError(f"tokens: expected at least two, got {len(tokens)} in {tokens.path}")
    asked = {"kind": KIND, "version": VERSION, "vocab_size": V, "tokens": len(tokens), "stream": tokens.header}
    found = read_header(path, KIND)
    if found is not None and not differences(found, asked):
        return Bigrams(path)
    keys, numbers = _counted(tokens, watch)
    with Writer(path, asked) as file:
        file.add("keys", "I64", keys)
        file.add("numbers", "I64", numbers)
        file.done(pairs=len(keys))
    return Bigrams(path)


Counts = tuple["Tensor", "Tensor"]
"""Keys, all different and in order, and how often each occurs."""


def _counted(tokens: TokenFile, watch: Callable[[int], None]) -> Counts:
    # What is merged is of like size, as in a merge sort: of the last two, the earlier one is over twice the later.
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
    """Keys in order; they may be sorted in their place."""
    try:
        array = keys.numpy()
    except RuntimeError:  # torch without NumPy; it sorts three times as slowly
        return keys.sort().values
    array.sort()
    return keys


def _runs(keys: Tensor) -> Counts:
    """Keys in order, each once, and how often they came."""
    ends = torch.cat(((keys[1:] != keys[:-1]).nonzero().squeeze(1), torch.tensor([len(keys) - 1])))
    return keys[ends], torch.diff(ends, prepend=torch.tensor([-1]))


def merged(a: Counts, b: Counts) -> Counts:
    """The counts of two streams together."""
    (keys, numbers), (more, more_numbers) = a, b
    place = torch.searchsorted(keys, more)
    known = keys[place.clamp(max=len(keys) - 1)] == more
    numbers = numbers.clone()
    numbers[place[known]] += more_numbers[known]
    new = place[~known]
    # A new key stands after the old ones below it and the new ones before it.
    where = new + torch.arange(len(new))
    old = torch.ones(len(keys) + len(new), dtype=torch.bool)
    old[where] = False
    out, out_numbers = torch.empty(2, len(old), dtype=torch.int64)
    out[where], out_numbers[where] = more[~known], more_numbers[~known]
    out[old], out_numbers[old] = keys, numbers
    return out, out_numbers


def _look_up(keys: Tensor, numbers: Tensor, wanted: Tensor) -> Tensor:
    place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return torch.where(keys[place] == wanted, numbers[place], 0)
