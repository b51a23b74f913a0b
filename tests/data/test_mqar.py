"""MQAR: every rule on every example, read as a person would; the distributions of what is drawn; no shortcuts."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membydesign.data.mqar import BLOCK_SIZE, MQAR, Examples, fits, without_taken

KINDS = {
    "base": MQAR(64, 4),
    "full": MQAR(32, 8, vocab_size=64),
    "odd length": MQAR(23, 5, vocab_size=50),
    "update": MQAR(64, 8, updates=8),
    "many rewrites": MQAR(64, 3, updates=20, vocab_size=24),
    "block": MQAR(64, 8, block=2),
    "one block": MQAR(40, 6, block=6, vocab_size=30),
    "halves": MQAR(64, 8, shared_vocabulary=False, vocab_size=128),
    "halves, update": MQAR(64, 8, updates=5, shared_vocabulary=False, vocab_size=40),
    "even queries": MQAR(48, 6, power=1.0),
    "one pair, one token": MQAR(4, 1, vocab_size=2),
}


def same(one: Examples, other: Examples) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(
            (one.input_ids, one.labels, one.rewrites), (other.input_ids, other.labels, other.rewrites), strict=True
        )
    )


def read(kind: MQAR, tokens: list[int], labels: list[int], rewrites: list[int]) -> None:
    """Read one sequence from left to right and refuse whatever breaks a rule."""
    D, U, B = kind.pairs, kind.updates, kind.block
    assert len(tokens) == len(labels) == len(rewrites) == kind.length
    context = 2 * (D + U)
    writes: list[tuple[int, int]] = []
    for start in range(0, context, 2 * B):
        keys, values = tokens[start : start + B], tokens[start + B : start + 2 * B]
        writes += zip(keys, values, strict=True)
    first = [key for key, _ in writes[:D]]
    assert len(set(first)) == D
    assert len({value for _, value in writes}) == D + U
    assert all(key in first for key, _ in writes[D:])

    half = kind.vocab_size // 2
    for key, value in writes:
        if kind.shared_vocabulary:
            assert 1 <= key < kind.vocab_size
            assert 1 <= value < kind.vocab_size
        else:
            assert 1 <= key < half <= value < kind.vocab_size

    memory: dict[int, int] = {}
    times: Counter[int] = Counter()
    for key, value in writes:
        times[key] += key in memory
        memory[key] = value
    assert all(label == -100 for label in labels[:context])
    assert all(count == -1 for count in rewrites[:context])
    queries = []
    for position in range(context, kind.length):
        if tokens[position] == 0:
            assert labels[position] == -100
            assert rewrites[position] == -1
        else:
            assert (position - context) % 2 == 0
            assert labels[position] == memory[tokens[position]]
            assert rewrites[position] == times[tokens[position]]
            queries.append(tokens[position])
    assert sorted(queries) == sorted(first)


def read_all(kind: MQAR, examples: Examples) -> None:
    rows = (examples.input_ids.tolist(), examples.labels.tolist(), examples.rewrites.tolist())
    for row in zip(*rows, strict=True):
        read(kind, *row)


def assert_frequencies(found: dict, probabilities: dict) -> None:
    """Pearson's χ² at five of its standard deviations; every outcome is a possible one."""
    total = sum(found.values())
    assert found.keys() <= probabilities.keys()
    assert math.isclose(sum(probabilities.values()), 1)
    chi2 = sum((found.get(x, 0) - total * p) ** 2 / (total * p) for x, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), (chi2, freedom)


def law(kind: MQAR) -> list[float]:
    """p(i) ∝ a·i^(a-1)."""
    slots = (kind.length - 2 * (kind.pairs + kind.updates)) // 2
    weights = [kind.power * i ** (kind.power - 1) for i in range(1, slots + 1)]
    return [w / sum(weights) for w in weights]


def gaps_of(kind: MQAR, examples: Examples) -> list[tuple[int, ...]]:
    """The gap of the query of each key, keys in the order of their first writes."""
    context = 2 * (kind.pairs + kind.updates)
    found = []
    for row in examples.input_ids.tolist():
        keys = row[0 : 2 * kind.pairs : 2]
        queries = row[context:]
        found.append(tuple(queries.index(key) // 2 for key in keys))
    return found


class TestRules:
    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
    def test_every_example_follows_every_rule(self, kind):
        examples = kind.sample(1200, "train", 0)
        assert len(examples) == 1200
        for x in (examples.input_ids, examples.labels, examples.rewrites):
            assert x.dtype == torch.int64
            assert x.shape == (1200, kind.length)
        read_all(kind, examples)

    @given(data=st.data())
    def test_any_setting(self, data):
        block = data.draw(st.integers(1, 3))
        pairs = block * data.draw(st.integers(1, 4))
        updates = data.draw(st.integers(0, 6)) if block == 1 else 0
        length = 4 * pairs + 2 * updates + data.draw(st.integers(0, 9))
        shared = data.draw(st.booleans())
        least = 1 + pairs + updates if shared else 2 * (1 + pairs + updates)
        vocab_size = least + data.draw(st.integers(0, 20))
        power = data.draw(st.sampled_from((0.01, 0.5, 1.0, 2.0)))
        kind = MQAR(length, pairs, updates, block, vocab_size, power, shared)
        read_all(kind, kind.sample(20, "any"))

    def test_the_papers_example(self):
        # A4 B5 A4' A4*, then the queries A and B.
        kind = MQAR(13, 2, updates=2, vocab_size=10)
        made = kind._write(
            torch.tensor([[1, 2]]), torch.tensor([[4, 5, 6, 7]]), torch.tensor([[0, 0]]), torch.tensor([[1, 0]])
        )
        assert made.input_ids.tolist() == [[1, 4, 2, 5, 1, 6, 1, 7, 2, 0, 1, 0, 0]]
        assert made.labels.tolist() == [[-100] * 8 + [5, -100, 7, -100, -100]]
        assert made.rewrites.tolist() == [[-1] * 8 + [0, -1, 2, -1, -1]]

    def test_the_papers_blocks(self):
        # AB 45 CD 72, then the queries.
        kind = MQAR(16, 4, block=2, vocab_size=20)
        made = kind._write(
            torch.tensor([[11, 12, 13, 14]]),
            torch.tensor([[4, 5, 7, 2]]),
            torch.empty(1, 0, dtype=torch.int64),
            torch.tensor([[2, 3, 0, 1]]),
        )
        assert made.input_ids.tolist() == [[11, 12, 4, 5, 13, 14, 7, 2, 13, 0, 14, 0, 11, 0, 12, 0]]
        assert made.labels[0, 8::2].tolist() == [7, 2, 4, 5]

    def test_ranks_among_what_is_left(self):
        for ranks in itertools.product(range(5), range(4), range(3), range(2)):
            left = list(range(5))
            expected = [left.pop(rank) for rank in ranks]
            assert without_taken(torch.tensor([ranks])).tolist() == [expected]


class TestDistributions:
    def test_gaps_one_after_another(self):
        kind = MQAR(6 + 10, 3, vocab_size=30)
        p = law(kind)
        probabilities = {
            (i, j, k): p[i] * p[j] / (1 - p[i]) * p[k] / (1 - p[i] - p[j])
            for i, j, k in itertools.permutations(range(5), 3)
        }
        assert_frequencies(Counter(gaps_of(kind, kind.sample(20_000, "gaps"))), probabilities)

    @pytest.mark.parametrize("kind", [MQAR(128, 16, updates=4), MQAR(128, 4, power=1.0)], ids=lambda k: k.name)
    def test_the_first_key_has_the_law_itself(self, kind):
        found = Counter(gaps[0] for gaps in gaps_of(kind, kind.sample(10_000, "gaps")))
        assert_frequencies(found, dict(enumerate(law(kind))))

    def test_rewrites_are_uniform_over_keys(self):
        kind = MQAR(40, 5, updates=3, vocab_size=30)
        found = Counter()
        for row in kind.sample(20_000, "updates").input_ids.tolist():
            keys = row[0:10:2]
            found[tuple(keys.index(key) for key in row[10:16:2])] += 1
        assert_frequencies(found, dict.fromkeys(itertools.product(range(5), repeat=3), 1 / 125))

    @pytest.mark.parametrize("shared", [True, False])
    def test_every_order_of_tokens_is_equally_likely(self, shared):
        kind = MQAR(12, 2, updates=1, vocab_size=6 if shared else 10, shared_vocabulary=shared)
        ids = kind.sample(20_000, "tokens").input_ids
        tokens = range(1, 6) if shared else range(1, 5)
        keys = list(itertools.permutations(tokens, 2))
        assert_frequencies(Counter(map(tuple, ids[:, [0, 2]].tolist())), dict.fromkeys(keys, 1 / len(keys)))
        values = list(itertools.permutations(range(1, 6) if shared else range(5, 10), 3))
        assert_frequencies(Counter(map(tuple, ids[:, [1, 3, 5]].tolist())), dict.fromkeys(values, 1 / len(values)))

    def test_keys_and_values_are_independent(self):
        kind = MQAR(12, 2, updates=1, vocab_size=6)
        ids = kind.sample(20_000, "independent").input_ids
        tokens = list(itertools.product(range(1, 6), repeat=2))
        for key, value in itertools.product((0, 2), (1, 3, 5)):
            found = Counter(map(tuple, ids[:, [key, value]].tolist()))
            assert_frequencies(found, dict.fromkeys(tokens, 1 / 25))

    def test_a_token_is_key_and_value_at_the_expected_rate(self):
        kind = MQAR(64, 8, updates=8, vocab_size=257)
        ids = kind.sample(10_000, "both roles").input_ids
        keys, values = ids[:, 0:16:2], ids[:, 1:32:2]
        both = (keys[:, :, None] == values[:, None, :]).sum().item()
        expected = len(ids) * 8 * 16 / 256
        assert abs(both - expected) < 5 * math.sqrt(expected)
        # Zoology's halves never share one.
        ids = MQAR(64, 8, updates=8, vocab_size=257, shared_vocabulary=False).sample(1000, "both roles").input_ids
        assert ids[:, 0:32:2].max() < 128 <= ids[:, 1:32:2].min()


class TestShortcuts:
    """The best guess from a query's token and position alone is as good as no guess."""

    @pytest.mark.parametrize(
        "kind",
        [
            MQAR(32, 4, vocab_size=12),
            MQAR(32, 4, updates=4, vocab_size=12),
            MQAR(32, 4, block=2, vocab_size=12),
            MQAR(32, 4, vocab_size=12, shared_vocabulary=False),
        ],
        ids=lambda kind: kind.name,
    )
    @pytest.mark.parametrize("sees", ["token", "token and position", "position and rewrites"])
    def test_a_table_of_labels_is_at_chance(self, kind, sees):
        def seen(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
            row, position = examples.queried.nonzero(as_tuple=True)
            token, rewrites = examples.input_ids[row, position], examples.rewrites[row, position]
            situation = {
                "token": token,
                "token and position": token * kind.length + position,
                "position and rewrites": rewrites * kind.length + position,
            }[sees]
            return situation, examples.labels[row, position]

        situation, label = seen(kind.sample(10_000, "train", 0))
        counts = torch.zeros(int(situation.max()) + 1, kind.vocab_size, dtype=torch.int64)
        counts.index_put_((situation, label), torch.ones_like(label), accumulate=True)
        situation, label = seen(kind.sample(5_000, "test", 0))
        guess = counts[situation.clamp(max=len(counts) - 1)].argmax(-1)
        chance = 1 / kind.token_ranges[1][1]
        accuracy = (guess == label).double().mean().item()
        assert abs(accuracy - chance) < 5 * math.sqrt(chance * (1 - chance) / len(label))


class TestStreams:
    def test_more_examples_begin_with_the_fewer(self):
        kind = MQAR(64, 8, updates=2)
        many, few = kind.sample(2500, "train", 3), kind.sample(1000, "train", 3)
        assert same(many[:1000], few)
        assert same(kind.sample(7, "train", 3), few[:7])

    def test_blocks_can_be_made_apart(self):
        kind = MQAR(64, 8, updates=2)
        many = kind.sample(3 * BLOCK_SIZE, "train", 3)
        for b in (2, 0, 1):
            assert same(kind.sample_block(b, "train", 3), many[b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE])

    def test_nothing_else_moves_a_stream(self):
        kind = MQAR(64, 8, updates=2)
        before = kind.sample(10, "train", 0)
        torch.manual_seed(1)
        state = torch.get_rng_state()
        with torch.device("meta"):
            assert same(kind.sample(10, "train", 0), before)
        assert torch.equal(torch.get_rng_state(), state)

    def test_paths_and_blocks_and_kinds_share_nothing(self):
        kind, other = MQAR(64, 8), MQAR(64, 8, power=0.5)
        made = [
            *(kind.sample(200, split, seed) for split in ("train", "validation", "test") for seed in (0, 1)),
            kind.sample_block(1, "train", 0)[:200],
            other.sample(200, "train", 0),
        ]
        sequences = [tuple(row) for examples in made for row in examples.input_ids.tolist()]
        assert len(set(sequences)) == len(sequences)
        contexts = {row[:16] for row in sequences}
        assert len(contexts) == len(sequences)


class TestExamples:
    def test_rows_and_types(self):
        examples = MQAR(16, 2, vocab_size=20).sample(30, "rows")
        rows = torch.tensor([4, 4, 29])
        assert torch.equal(examples[rows].labels, examples.labels[rows])
        assert len(examples[10:13]) == 3
        assert examples.to(torch.int32).rewrites.dtype == torch.int32
        assert same(examples.to(torch.int32).to(torch.int64), examples)
        assert torch.equal(examples.queried, examples.rewrites >= 0)
        assert torch.equal(examples.queried.sum(1), torch.full((30,), 2))


class TestBadArguments:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"length": 0}, "length: expected a whole number of at least 1, got 0"),
            ({"length": 64.0}, "length: .* got 64.0"),
            ({"pairs": 0}, "pairs: .* at least 1, got 0"),
            ({"pairs": True}, "pairs: .* got True"),
            ({"updates": -1}, "updates: .* at least 0, got -1"),
            ({"block": 0}, "block: .* at least 1, got 0"),
            ({"vocab_size": 1}, "vocab_size: .* at least 2, got 1"),
            ({"power": 0.0}, "power: expected a number above 0, got 0.0"),
            ({"power": math.nan}, "power: .* got nan"),
            ({"power": math.inf}, "power: .* got inf"),
            ({"power": "a"}, "power: .* got 'a'"),
            ({"shared_vocabulary": 1}, "shared_vocabulary: expected True or False, got 1"),
            ({"pairs": 17}, "length: expected at least .* = 68 for pairs=17 and updates=0, got 64"),
            ({"updates": 25}, "length: expected at least .* = 66 for pairs=4 and updates=25, got 64"),
            ({"block": 3}, "block: expected a divisor of pairs=4, got 3"),
            ({"block": 2, "updates": 1}, "updates: expected 0 with block=2, got 1"),
            ({"vocab_size": 4}, "vocab_size: expected at least 4 tokens for keys and 4 for values, got 4, with 3 and"),
            ({"vocab_size": 7, "updates": 3}, "vocab_size: expected at least 4 .* and 7 for values, got 7"),
            ({"vocab_size": 9, "shared_vocabulary": False}, "vocab_size: .* got 9, with 3 and 5"),
        ],
    )
    def test_settings(self, settings, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            MQAR(**{"length": 64, "pairs": 4} | settings)

    def test_the_smallest_vocabularies(self):
        assert MQAR(64, 4, updates=3, vocab_size=8).token_ranges == ((1, 7), (1, 7))
        assert MQAR(64, 4, vocab_size=10, shared_vocabulary=False).token_ranges == ((1, 4), (5, 5))

    def test_numbers_of_examples(self):
        kind = MQAR(16, 2)
        with pytest.raises(ValueError, match="^examples: expected a whole number of at least 1, got 0"):
            kind.sample(0, "train")
        with pytest.raises(ValueError, match="^index: expected a whole number of at least 0, got -1"):
            kind.sample_block(-1, "train")

    def test_fits(self):
        assert fits(64, 16)
        assert not fits(63, 16)
        assert not any(fits(64, 16, U) for U in (16, 8, 4, 2))
        assert all(fits(128, 16, U) for U in (16, 8, 4, 2))
        assert not fits(2, 4, 4)
