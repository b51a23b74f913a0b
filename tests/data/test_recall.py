"""Sequences of writes and queries, against the rules of the paper checked one token at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from membydesign.data.recall import QUERY, WRITE, Collisions, RandomKeys, overlap_statistics
from membydesign.data.seeds import generator


def drawn(n_f=3, overlap=(0.6, 0.8), examples=5, task=None, seed=0):
    return (task or Collisions()).sample(examples, n_f, overlap, generator("test", seed))


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 9), st.integers(0, 1000))
def test_a_sequence_has_the_four_phases(K, n_b, n_f, seed):
    """Read every token back into (type, identity, label) and walk through the phases."""
    batch = drawn(n_f, examples=2, task=Collisions(pairs=K, target_writes=n_b), seed=seed)
    for tokens, addresses, answers, rivals in zip(*batch, strict=True):
        kinds, shown, values = tokens[:, 0], tokens[:, 1 : 1 + 2 * K], tokens[:, 1 + 2 * K :]
        assert torch.equal(shown, addresses), "the token shows the address that the memory uses"
        identities, labels = [], {}
        for t, key in enumerate(addresses):
            pair = int(key[0::2].argmax())
            target = key[2 * pair] == 1
            identity = ("B" if target else "A", pair)
            expected = torch.zeros(2 * K)
            expected[2 * pair] = 1 if target else key[2 * pair]
            expected[2 * pair + 1] = 0 if target else math.sqrt(1 - key[2 * pair] ** 2)
            torch.testing.assert_close(key, expected)
            identities.append(identity)
            if t < len(tokens) - K:
                assert kinds[t] == WRITE
                assert sorted(values[t].tolist()) == [0.0] * (2 * K - 1) + [1.0]
                assert labels.setdefault(identity, int(values[t].argmax())) == int(values[t].argmax())
            else:
                assert kinds[t] == QUERY
                assert not values[t].any()
        everyone = {(role, i) for role in "AB" for i in range(K)}
        assert set(identities[: 2 * K]) == everyone, "seed: every identity once"
        targets = [("B", i) for i in range(K) for _ in range(n_b)]
        distractors = [("A", i) for i in range(K) for _ in range(n_f)]
        assert identities[2 * K : -K] == targets + distractors
        assert set(identities[-K:]) == {("B", i) for i in range(K)}, "one query for each target"
        assert sorted(labels.values()) == list(range(2 * K)), "labels are a permutation"
        assert answers.tolist() == [labels[identity] for identity in identities[-K:]]
        assert rivals.tolist() == [labels["A", i] for _, i in identities[-K:]]


def test_the_token_is_the_paper_s():
    batch = drawn(n_f=8)
    assert Collisions().token_dim == 33
    assert batch.tokens.shape == (5, 16 + 8 * 4 + 8 * 8 + 8, 33)
    assert batch.addresses.shape == (5, 120, 16)


def test_overlaps_are_uniform_in_their_range_and_differ_between_pairs():
    batch = drawn(n_f=1, overlap=(0.6, 0.8), examples=2000)
    rho = batch.addresses[:, 16 + 32 : 16 + 32 + 8]  # A_1, …, A_8
    rho = rho[:, torch.arange(8), 2 * torch.arange(8)]
    assert rho.min() >= 0.6
    assert rho.max() <= 0.8
    assert rho.mean().item() == pytest.approx(0.7, abs=0.002)
    assert rho.std().item() == pytest.approx(0.2 / math.sqrt(12), rel=0.03)
    assert abs(torch.corrcoef(rho.T)[0, 1].item()) < 0.1


def test_orders_and_labels_are_fresh_for_every_sequence():
    batch = drawn(examples=4000, n_f=1)
    first = batch.addresses[:, 0].abs().argmax(-1)  # not the identity, but uniform if the order is
    assert torch.bincount(first, minlength=16)[0::2].float().std() / 250 < 0.6
    counts = torch.bincount(batch.answers.flatten(), minlength=16).float()
    assert (counts - 2000).abs().max() < 6 * math.sqrt(2000), "every label is right equally often"
    order = batch.addresses[:, -8:].argmax(-1)
    assert len({tuple(row) for row in order[:500].tolist()}) > 480


def test_streams_depend_on_their_names_alone():
    one, again, other = (drawn(seed=s).tokens for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    train, test = (torch.rand(4, generator=generator("recall", split, 0)) for split in ("train", "test"))
    assert not torch.equal(train, test)


def test_random_keys_by_hand():
    task = RandomKeys()
    R = task.projection()
    torch.testing.assert_close(R @ R.T, torch.eye(16))
    batch = task.sample(6, 20, generator("test", 1))
    assert batch.tokens.shape == (6, 28, 129)
    for tokens, addresses, answers in zip(batch.tokens, batch.addresses, batch.answers, strict=True):
        raw, values = tokens[:, 1:65], tokens[:, 65:]
        torch.testing.assert_close(raw.norm(dim=-1), torch.ones(28))
        projected = raw @ R.T
        torch.testing.assert_close(addresses, projected / projected.norm(dim=-1, keepdim=True))
        assert tokens[:, 0].tolist() == [WRITE] * 20 + [QUERY] * 8
        asked = [int((raw[:20] - q).norm(dim=-1).argmin()) for q in raw[20:]]
        assert len(set(asked)) == 8, "queries are for different writes"
        assert [int(values[i].argmax()) for i in asked] == answers.tolist()
        assert not values[20:].any()


def test_the_projection_is_frozen():
    assert torch.equal(RandomKeys().projection(), RandomKeys().projection())
    assert not torch.equal(RandomKeys().projection(), RandomKeys(projection_seed=1).projection())


def test_collisions_after_projection_are_those_of_random_directions():
    addresses = RandomKeys().sample(400, 64, generator("test", 2)).addresses[:, :64]
    found = overlap_statistics(addresses)
    assert found["n/D"] == 4
    assert found["mean_square_overlap"] == pytest.approx(1 / 16, rel=0.02)
    slow = [float(a @ b) for x in addresses[:3] for i, a in enumerate(x) for j, b in enumerate(x) if i != j]
    few = overlap_statistics(addresses[:3])
    assert few["mean_absolute_overlap"] == pytest.approx(sum(map(abs, slow)) / len(slow), rel=1e-5)


def test_a_model_that_sees_only_the_query_is_at_chance():
    """The best guess from the query's address alone: the most frequent label of that target in other sequences."""
    train, test = drawn(examples=4000, n_f=1, seed=1), drawn(examples=2000, n_f=1, seed=2)
    counts = torch.zeros(8, 16)
    for batch_target, answers in ((train.addresses[:, -8:].argmax(-1) // 2, train.answers),):
        counts.index_put_((batch_target.flatten(), answers.flatten()), torch.ones(answers.numel()), accumulate=True)
    guess = counts.argmax(-1)[test.addresses[:, -8:].argmax(-1) // 2]
    right = (guess == test.answers).float().mean().item()
    assert right == pytest.approx(1 / 16, abs=4 * math.sqrt(1 / 16 * 15 / 16 / 16000))


def test_a_model_that_sees_only_the_query_of_random_keys_is_at_chance():
    """The guess from the query's address alone: the answer to the nearest address that was asked in other sequences."""
    task = RandomKeys()
    train, test = (task.sample(1000, 16, generator("test", "leak", i)) for i in range(2))
    asked, answers = train.addresses[:, -8:].flatten(0, 1), train.answers.flatten()
    nearest = (test.addresses[:, -8:].flatten(0, 1) @ asked.T).argmax(-1)
    right = (answers[nearest] == test.answers.flatten()).float().mean().item()
    assert right == pytest.approx(1 / 64, abs=4 * math.sqrt(1 / 64 * 63 / 64 / 8000))


@pytest.mark.parametrize("overlap", [(0.8, 0.6), (-0.1, 0.5), (0.5, 1.1)])
def test_bad_overlaps_are_named(overlap):
    with pytest.raises(ValueError, match="overlap: expected 0 <= low <= high <= 1"):
        drawn(overlap=overlap)


def test_too_few_writes_are_named():
    with pytest.raises(ValueError, match="writes: expected at least the 8 queries, got 4"):
        RandomKeys().sample(1, 4, generator("test", 0))
