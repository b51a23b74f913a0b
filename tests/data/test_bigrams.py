"""Counts of pairs beside `collections.Counter`: in many chunks, on disk, with and without NumPy."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membydesign.data import bigrams
from membydesign.data.bigrams import Bigrams, count_bigrams, merged
from membydesign.data.tensor_files import Writer
from membydesign.data.text import PythonHelp
from membydesign.data.token_files import TokenFile, pack
from text_problem import help_tokenizer


def stream(path, tokens: torch.Tensor, vocab_size: int) -> TokenFile:
    with Writer(path, {"kind": "tokens", "version": 1, "vocab_size": vocab_size}) as file:
        file.add("tokens", "U32", tokens.to(torch.int32))
        file.done(tokens=len(tokens), documents=1)
    return TokenFile(path)


def random_tokens(n: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Few frequent and many rare ones."""
    draws = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (draws**4 * vocab_size).long()


def assert_counts_are_right(found: Bigrams, tokens: list[int], vocab_size: int) -> None:
    expected = Counter(pairwise(tokens))
    assert len(found) == len(expected)
    assert found.keys.tolist() == sorted(a * vocab_size + b for a, b in expected)
    pairs = torch.tensor(list(expected))
    assert found.counts(pairs).tolist() == list(expected.values())
    assert int(found.numbers.sum()) == len(tokens) - 1 == found.tokens - 1
    others = torch.randint(vocab_size, (500, 2), generator=torch.Generator().manual_seed(1))
    assert found.counts(others).tolist() == [expected[a, b] for a, b in others.tolist()]


@pytest.mark.parametrize(("n", "vocab_size", "chunk"), [(2, 5, 4), (997, 7, 10), (5000, 300, 64), (9000, 2**17, 1000)])
@pytest.mark.parametrize("numpy", [True, False])
def test_counts_in_chunks(tmp_path, monkeypatch, n, vocab_size, chunk, numpy):
    def missing(_):
        raise RuntimeError("Numpy is not available")

    if not numpy:
        monkeypatch.setattr(torch.Tensor, "numpy", missing)
    monkeypatch.setattr(bigrams, "CHUNK", chunk)
    tokens, told = random_tokens(n, vocab_size), []
    file = stream(tmp_path / "tokens", tokens, vocab_size)
    found = count_bigrams(file, tmp_path / "bigrams", watch=told.append)
    assert_counts_are_right(found, tokens.tolist(), vocab_size)
    assert told == [*range(chunk, n - 1, chunk), n - 1]


def test_pythons_help(tmp_path):
    """Real text, and pairs with BOS like any others."""
    file = pack(PythonHelp(), help_tokenizer(tmp_path), tmp_path / "tokens")
    tokens = file.read(0, len(file)).tolist()
    found = count_bigrams(file, tmp_path / "bigrams")
    assert_counts_are_right(found, tokens, 512)
    after = Counter(b for a, b in pairwise(tokens) if a == file.header["bos"])
    (most, times), *_ = after.most_common(1)
    assert found.counts(torch.tensor([file.header["bos"], most])).item() == times > 1


counts = st.dictionaries(st.integers(0, 40), st.integers(1, 9), min_size=1)


@given(counts, counts)
def test_merging(a, b):
    def tensors(of):
        return torch.tensor(sorted(of)), torch.tensor([of[key] for key in sorted(of)])

    keys, numbers = merged(tensors(a), tensors(b))
    expected = Counter(a) + Counter(b)
    assert keys.tolist() == sorted(expected)
    assert numbers.tolist() == [expected[key] for key in sorted(expected)]


def test_shapes_of_pairs(tmp_path):
    tokens = random_tokens(100, 9)
    found = count_bigrams(stream(tmp_path / "tokens", tokens, 9), tmp_path / "bigrams")
    pairs = torch.stack((tokens[:-1], tokens[1:]), -1)
    assert found.counts(pairs.view(9, 11, 2)).tolist() == found.counts(pairs).view(9, 11).tolist()
    assert found.counts(pairs[:0]).shape == (0,)
    assert found.counts(pairs.to(torch.int16)).equal(found.counts(pairs))


def test_they_are_counted_once_and_anew_for_another_stream(tmp_path, monkeypatch):
    path = tmp_path / "bigrams"
    one = stream(tmp_path / "one", random_tokens(50, 9), 9)
    two = stream(tmp_path / "two", random_tokens(50, 9, seed=1), 9)
    found = count_bigrams(one, path)
    found.check(one)
    with pytest.raises(ValueError, match="^path: expected the counts of .*two, got those of another stream"):
        found.check(two)
    told = []
    count_bigrams(one, path, watch=told.append)
    assert told == []
    count_bigrams(two, path, watch=told.append).check(two)
    assert told == [49]
    with pytest.raises(ValueError, match="^path: expected a file of bigrams, and .* is one of tokens"):
        count_bigrams(two, tmp_path / "one")


def test_mistakes(tmp_path):
    found = count_bigrams(stream(tmp_path / "tokens", random_tokens(50, 9), 9), tmp_path / "bigrams")
    with pytest.raises(ValueError, match=r"^pairs: expected tokens \[...,2\], got torch.int64 \[4, 3\]"):
        found.counts(torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^pairs: expected tokens \[...,2\], got torch.float32"):
        found.counts(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="^pairs: expected tokens from 0 to 8, got 3 to 9"):
        found.counts(torch.tensor([3, 9]))
    with pytest.raises(ValueError, match="^tokens: expected at least two, got 1"):
        count_bigrams(stream(tmp_path / "one", torch.tensor([3]), 9), tmp_path / "x")
