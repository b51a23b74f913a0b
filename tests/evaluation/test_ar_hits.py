"""AR-hits beside a loop that says what they are, on random tokens and on real text; perplexities of slices."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membydesign.data.bigrams import count_bigrams
from membydesign.data.tensor_files import Writer
from membydesign.data.text import PythonHelp
from membydesign.data.token_files import TokenFile, pack
from membydesign.data.windows import Windows
from membydesign.evaluation.ar_hits import Hits, Slice, ar_hits, pair_distance, rarity_threshold, slices
from text_problem import help_tokenizer


def slow_hits(windows, training, threshold, most):
    """The definition, token by token."""
    masks, distances = [], []
    for window in windows:
        mask, distance = [], []
        for t in range(1, len(window)):
            pair = [window[t - 1], window[t]]
            before = [s for s in range(1, t) if [window[s - 1], window[s]] == pair]
            count = sum(training[i : i + 2] == pair for i in range(len(training) - 1)) if before else 0
            distance.append(t - before[-1] if before else 0)
            mask.append(bool(before) and t - before[-1] <= most and count <= threshold)
        masks.append(mask)
        distances.append(distance)
    return masks, distances


def stream(path, tokens: list[int], vocab_size: int) -> TokenFile:
    with Writer(path, {"kind": "tokens", "version": 1, "vocab_size": vocab_size}) as file:
        file.add("tokens", "U32", torch.tensor(tokens, dtype=torch.int32))
        file.done(tokens=len(tokens), documents=1)
    return TokenFile(path)


@pytest.mark.parametrize(("vocab_size", "most", "threshold"), [(3, 5, 12), (6, 1024, 3), (6, 8, 2), (40, 1024, 0)])
def test_random_tokens(tmp_path, vocab_size, most, threshold):
    source = torch.Generator().manual_seed(vocab_size)
    training = torch.randint(vocab_size, (120,), generator=source).tolist()
    windows = torch.randint(vocab_size, (6, 50), generator=source)
    found = ar_hits(
        windows, count_bigrams(stream(tmp_path / "t", training, vocab_size), tmp_path / "b"), threshold, most
    )
    mask, distance = slow_hits(windows.tolist(), training, threshold, most)
    assert found.mask.tolist() == mask
    assert found.distance.tolist() == distance
    assert 0 < found.mask.float().mean() < 1


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40))
def test_distances(window):
    _, expected = slow_hits([window], [], 0, 1024)
    assert pair_distance(torch.tensor([window])).tolist() == expected


def test_pythons_help(tmp_path):
    """Real text: training counts from one split, windows of the other, several documents in a window."""
    tokenizer = help_tokenizer(tmp_path)
    training = pack(PythonHelp(), tokenizer, tmp_path / "train")
    held_out = pack(PythonHelp("validation"), tokenizer, tmp_path / "validation")
    windows = next(Windows(held_out, 300).in_order(12))
    assert (windows == held_out.header["bos"]).sum() > 3
    for threshold in (0, 3):
        found = ar_hits(windows, count_bigrams(training, tmp_path / "bigrams"), threshold)
        mask, distance = slow_hits_by_dictionary(windows.tolist(), training.read(0, len(training)).tolist(), threshold)
        assert found.mask.tolist() == mask
        assert found.distance.tolist() == distance
        assert 0.005 < found.mask.float().mean() < 0.5


def slow_hits_by_dictionary(windows, training, threshold):
    """As `slow_hits` with d = 1,024, with dictionaries for longer text."""
    count: dict[tuple[int, int], int] = {}
    for pair in pairwise(training):
        count[pair] = count.get(pair, 0) + 1
    masks, distances = [], []
    for window in windows:
        last: dict[tuple[int, int], int] = {}
        mask, distance = [], []
        for t, pair in enumerate(pairwise(window)):
            distance.append(t - last[pair] if pair in last else 0)
            mask.append(0 < distance[-1] <= 1024 and count.get(pair, 0) <= threshold)
            last[pair] = t
        masks.append(mask)
        distances.append(distance)
    return masks, distances


def test_hits_are_at_most_1024_tokens_apart(tmp_path):
    """A pair twice in a window of otherwise different tokens, at the last distance that counts and one further."""
    bigrams = count_bigrams(stream(tmp_path / "t", [0, 1], 5000), tmp_path / "b")
    for apart, hit in ((1024, True), (1025, False)):
        window = torch.arange(2, 2002)
        window[100], window[101] = 4000, 4001
        window[100 + apart], window[101 + apart] = 4000, 4001
        found = ar_hits(window[None], bigrams)
        assert found.distance.nonzero().tolist() == [[0, 100 + apart]]
        assert found.distance.max() == apart
        assert found.mask.any() == hit


def test_the_threshold_scales_with_the_training_text(tmp_path):
    assert rarity_threshold(130_000_000) == 16, "the paper's"
    assert rarity_threshold(10_000_000_000) == 1250, "Zoology's"
    assert [rarity_threshold(n) for n in (1, 7_999_999, 8_000_000, 15_999_999, 16_000_000)] == [0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="^tokens: expected a whole number of at least 1, got 0"):
        rarity_threshold(0)
    # A small training text: only pairs that it does not have are rare.
    bigrams = count_bigrams(stream(tmp_path / "t", [1, 2, 3], 9), tmp_path / "b")
    window = torch.tensor([[1, 2, 5, 6, 1, 2, 5, 6]])
    assert ar_hits(window, bigrams).mask.tolist() == [[False, False, False, False, False, True, True]]
    assert ar_hits(window, bigrams, threshold=1).mask.tolist() == [[False] * 4 + [True] * 3]


class TestSlices:
    def test_perplexities(self):
        distance = torch.tensor([[0, 1, 64, 65, 256], [257, 1024, 1025, 5, 0]])
        mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
        losses = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0], [32.0, 64.0, 128.0, 256.0, 512.0]]).log()
        found = slices(Hits(mask, distance), losses)
        expected = {
            "overall": (10, 2**4.5),
            "hit": (6, 2**3.5),
            "other": (4, 2**6),
            "hit 1–64": (2, 2**1.5),
            "hit 65–256": (2, 2**3.5),
            "hit 257–1,024": (2, 2**5.5),
        }
        assert list(found) == list(expected)
        for name, (tokens, perplexity) in expected.items():
            assert found[name].tokens == tokens
            assert found[name].perplexity == pytest.approx(perplexity, rel=1e-6)

    def test_every_token_is_in_its_slices(self, tmp_path):
        source = torch.Generator().manual_seed(0)
        windows = torch.randint(60, (3, 1500), generator=source)
        bigrams = count_bigrams(stream(tmp_path / "t", list(range(60)) * 2, 60), tmp_path / "b")
        found = slices(ar_hits(windows, bigrams), torch.rand(3, 1499, generator=source))
        assert found["overall"].tokens == 3 * 1499 == found["hit"].tokens + found["other"].tokens
        near = [x.tokens for name, x in found.items() if name.startswith("hit ")]
        assert sum(near) == found["hit"].tokens
        assert min(near) > 0
        total = sum(found[name].tokens * (found[name].loss or 0.0) for name in ("hit", "other"))
        assert total == pytest.approx(found["overall"].tokens * (found["overall"].loss or 0.0))

    def test_many_losses_are_summed_in_float64(self):
        losses = torch.full((64, 2**15), 0.1)
        none = torch.zeros(64, 2**15, dtype=torch.int64)
        found = slices(Hits(none.bool(), none), losses)
        assert found["overall"].loss == pytest.approx(losses[0, 0].item(), rel=1e-12)

    def test_empty_slices_have_no_perplexity(self):
        nothing = torch.zeros(1, 3, dtype=torch.int64)
        found = slices(Hits(nothing.bool(), nothing), torch.ones(1, 3))
        assert found["hit"] == Slice(0, None)
        assert found["hit"].perplexity is None
        assert found["other"].perplexity == pytest.approx(math.e)
        assert Slice(1, 1e4).perplexity == math.inf

    def test_mistakes(self):
        hits = Hits(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"^losses: expected \[2, 3\], as hits, got \[2, 4\]"):
            slices(hits, torch.zeros(2, 4))
        with pytest.raises(ValueError, match="^losses: expected finite losses, got 1 that are not"):
            slices(hits, torch.tensor([[0.0, 1, 2], [3, math.nan, 4]]))


def test_mistakes(tmp_path):
    bigrams = count_bigrams(stream(tmp_path / "t", [1, 2, 3], 9), tmp_path / "b")
    for bad in (torch.zeros(4, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"^windows: expected tokens \[N,L\] with L of at least 2"):
            ar_hits(bad, bigrams)
    with pytest.raises(ValueError, match="^threshold: expected a whole number of at least 0, got -1"):
        ar_hits(torch.zeros(1, 4, dtype=torch.int64), bigrams, -1)
    with pytest.raises(ValueError, match="^distance: expected a whole number of at least 1, got 0"):
        ar_hits(torch.zeros(1, 4, dtype=torch.int64), bigrams, 0, 0)
    with pytest.raises(ValueError, match="^pairs: expected tokens from 0 to 8, .* do they come from another tokenizer"):
        ar_hits(torch.full((1, 4), 11), bigrams)
    assert ar_hits(torch.zeros(0, 4, dtype=torch.int64), bigrams).mask.shape == (0, 3)
