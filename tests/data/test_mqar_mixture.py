"""Mixtures of MQAR: shares, epochs that visit everything once, batches by step, the paper's grids."""

import time
from collections import Counter
from itertools import islice

import pytest
import torch

from membydesign.data.mqar import MQAR, Examples
from membydesign.data.mqar_mixture import Mixture, Pool, base_mixture, block_mixture, update_mixture

KINDS = (MQAR(24, 4), MQAR(32, 4, updates=4), MQAR(32, 4, block=2))
BATCH = 8


def small(examples: int = 100, split: str = "train", seed: int = 0) -> Pool:
    return Mixture(KINDS).pool(examples, split, seed)


def rows(examples: Examples) -> list[tuple[int, ...]]:
    return [
        (*tokens, *labels, *rewrites)
        for tokens, labels, rewrites in zip(
            examples.input_ids.tolist(), examples.labels.tolist(), examples.rewrites.tolist(), strict=True
        )
    ]


def epoch(pool: Pool, index: int) -> list[list[tuple[int, ...]]]:
    return [rows(batch) for batch in pool.batches(index, BATCH)]


class TestPool:
    def test_shares_are_equal_and_examples_are_the_kinds_own(self):
        pool = small()
        assert [len(part) for part in pool.parts] == [34, 33, 33]
        assert len(pool) == 100
        for kind, part in zip(KINDS, pool.parts, strict=True):
            assert rows(part) == rows(kind.sample(len(part), "train", 0))

    def test_more_than_a_block(self):
        pool = Mixture(KINDS[:1]).pool(1500, "train", 0)
        assert rows(pool.parts[0]) == rows(KINDS[0].sample(1500, "train", 0))

    def test_an_epoch_visits_every_example_once(self):
        pool = small(3 * 4 * BATCH)
        everything = Counter(row for part in pool.parts for row in rows(part))
        assert set(everything.values()) == {1}
        for index in range(3):
            assert Counter(row for batch in epoch(pool, index) for row in batch) == everything

    def test_a_rest_is_left_out_and_never_the_same(self):
        pool = small()
        everything = {row for part in pool.parts for row in rows(part)}
        left = []
        for index in range(4):
            seen = [row for batch in epoch(pool, index) for row in batch]
            assert len(seen) == len(set(seen)) == 3 * 4 * BATCH
            left.append(everything - set(seen))
        assert [len(rest) for rest in left] == [4] * 4
        assert not set.intersection(*left)

    def test_batches_are_of_one_kind_and_kinds_are_mixed(self):
        pool = small(3 * 20 * BATCH)
        owner = {row: kind for kind, part in enumerate(pool.parts) for row in rows(part)}
        kinds = []
        for batch in pool.batches(0, BATCH):
            assert len(batch) == BATCH
            assert all(x.dtype == torch.int64 for x in (batch.input_ids, batch.labels, batch.rewrites))
            (kind,) = {owner[row] for row in rows(batch)}
            kinds.append(kind)
        assert Counter(kinds) == {0: 20, 1: 20, 2: 20}
        assert kinds != sorted(kinds)

    def test_epochs_differ_in_batches_and_in_their_order(self):
        pool = small(3 * 4 * BATCH)
        first, second = epoch(pool, 0), epoch(pool, 1)
        assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
        assert [len(batch[0]) for batch in first] != [len(batch[0]) for batch in second]

    def test_a_batch_depends_on_its_step_alone(self):
        pool = small()
        steps = pool.steps_per_epoch(BATCH)
        assert steps == 12
        one_after_another = [batch for index in range(3) for batch in epoch(pool, index)]
        another = small()
        for step in (30, 2, 35, 12, 11, 0, 23):
            other_size = another.batch(step, BATCH - 1)  # a batch of another size between does not matter
            assert len(other_size) == BATCH - 1
            assert rows(another.batch(step, BATCH)) == one_after_another[step]

    def test_seeds_and_splits_differ(self):
        pools = [small(), small(seed=1), small(split="validation"), small(split="test")]
        seen = [row for pool in pools for part in pool.parts for row in rows(part)]
        assert len(set(seen)) == len(seen)
        assert epoch(small(), 0) == epoch(pools[0], 0)

    def test_seeds_and_splits_have_orders_of_their_own(self):
        def order(pool: Pool) -> list[tuple[int, int]]:
            where = {row: (k, i) for k, part in enumerate(pool.parts) for i, row in enumerate(rows(part))}
            return [where[row] for batch in epoch(pool, 0) for row in batch]

        orders = [order(small(seed=seed, split=split)) for seed in (0, 1) for split in ("train", "test")]
        assert len(set(map(tuple, orders))) == 4

    def test_evaluation_sees_everything_in_order(self):
        pool = small()
        found = list(pool.in_order(BATCH))
        assert [len(batch) for _, batch in found] == [*[8] * 4, 2, *[8] * 4, 1, *[8] * 4, 1]
        for kind, part in zip(KINDS, pool.parts, strict=True):
            assert [row for k, batch in found if k == kind for row in rows(batch)] == rows(part)
        assert len(next(pool.in_order(1000))[1]) == 34

    def test_other_default_devices(self):
        expected = epoch(small(), 0)
        with torch.device("meta"):
            assert epoch(small(), 0) == expected


class TestThePapersMixtures:
    def test_base(self):
        mixture = base_mixture()
        assert [(k.length, k.pairs) for k in mixture.kinds] == [(64, 4), (128, 8), (128, 16), (128, 32)]
        assert all((k.updates, k.block, k.power, k.shared_vocabulary) == (0, 1, 0.01, True) for k in mixture.kinds)
        assert mixture.vocab_size == 8192
        (kind,) = base_mixture([(32, 8)], vocab_size=256, shared_vocabulary=False).kinds
        assert kind == MQAR(32, 8, vocab_size=256, shared_vocabulary=False)

    def test_update(self):
        found = [(k.length, k.pairs, k.updates) for k in update_mixture().kinds]
        assert found == [
            *((64, 4, U) for U in (4, 2, 1, 0)),
            *((128, 4, U) for U in (4, 2, 1, 0)),
            *((128, 16, U) for U in (16, 8, 4, 2)),
        ]

    @pytest.mark.parametrize("mixture", [base_mixture(), update_mixture(), block_mixture()])
    def test_a_hundred_thousand_examples_in_seconds(self, mixture):
        """One second on one core of a laptop; a loop over examples would take minutes."""
        started = time.monotonic()
        assert len(mixture.pool(100_000, "train", 0)) == 100_000
        assert time.monotonic() - started < 30

    def test_update_without_what_comes_twice(self):
        assert [k.updates for k in update_mixture((64,), (2,)).kinds] == [2, 1, 0]

    def test_block(self):
        kinds = block_mixture(vocab_size=64).kinds
        assert [(k.length, k.pairs, k.block, k.vocab_size) for k in kinds] == [(128, D, 2, 64) for D in (2, 4, 6, 8)]


class TestBadArguments:
    @pytest.mark.parametrize(
        ("kinds", "message"),
        [
            ((), r"kinds: expected a tuple of at least one MQAR, got \(\)"),
            ([MQAR(16, 2)], r"kinds: expected a tuple .* got \[MQAR"),
            ((MQAR(16, 2), "base"), "kinds: expected a tuple .* 'base'"),
            ((MQAR(16, 2, power=1), MQAR(16, 2, power=1.0)), "kinds: expected distinct kinds, got "),
            ((MQAR(16, 2), MQAR(16, 2, vocab_size=99)), r"kinds: expected one vocab_size, got \[8192, 99\]"),
        ],
    )
    def test_kinds(self, kinds, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            Mixture(kinds)

    def test_pools(self):
        mixture = Mixture(KINDS)
        with pytest.raises(ValueError, match="^examples: expected a whole number of at least 3, got 2"):
            mixture.pool(2, "train", 0)
        with pytest.raises(ValueError, match="^split: expected a name, got 0"):
            mixture.pool(3, 0, 0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="^seed: expected a whole number of at least 0, got None"):
            mixture.pool(3, "train", None)  # pyright: ignore[reportArgumentType]

    def test_batches(self):
        pool = small()
        with pytest.raises(ValueError, match="^batch_size: expected at most 33, the examples of a kind, got 34"):
            pool.batch(0, 34)
        with pytest.raises(ValueError, match="^batch_size: expected a whole number of at least 1, got 0"):
            pool.steps_per_epoch(0)
        with pytest.raises(ValueError, match="^step: expected a whole number of at least 0, got -1"):
            pool.batch(-1, BATCH)
        with pytest.raises(ValueError, match="^epoch: expected a whole number of at least 0, got 0.5"):
            list(islice(pool.batches(0.5, BATCH), 1))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="^batch_size: expected a whole number of at least 1, got 0"):
            list(pool.in_order(0))
