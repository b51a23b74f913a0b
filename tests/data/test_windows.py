"""Windows: every one once in an epoch, batches by step and seed alone, and the text in order for evaluation."""

import pytest
import torch

from membydesign.data.tensor_files import Writer
from membydesign.data.token_files import TokenFile
from membydesign.data.windows import Windows

TOKENS, LENGTH = 107, 10


@pytest.fixture
def file(tmp_path) -> TokenFile:
    return counting(tmp_path / "tokens", TOKENS)


def counting(path, n: int) -> TokenFile:
    """Tokens 0, 1, 2, …, so that a token says where it stands."""
    with Writer(path, {"kind": "tokens", "version": 1, "vocab_size": n}) as writer:
        writer.add("tokens", "U16", torch.arange(n).to(torch.int16))
        writer.done(tokens=n, documents=1)
    return TokenFile(path)


def test_windows_do_not_overlap_and_the_rest_is_left_out(file):
    windows = Windows(file, LENGTH)
    assert len(windows) == 10
    batches = list(windows.in_order(4))
    assert [tuple(batch.shape) for batch in batches] == [(4, 10), (4, 10), (2, 10)]
    assert torch.cat(batches).flatten().tolist() == list(range(100))
    assert batches[0].dtype == torch.int64


def test_an_epoch_has_every_window_once_and_the_next_another_order(file):
    windows = Windows(file, LENGTH)
    epochs = [torch.cat([windows.batch(step, 5) for step in (2 * e, 2 * e + 1)]) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(100))
        assert (epoch == epoch[:, :1] + torch.arange(LENGTH)).all()
    assert len({tuple(epoch[:, 0].tolist()) for epoch in epochs}) == 4


def test_the_stream_is_the_same_for_every_batch_size(file):
    expected = torch.cat([Windows(file, LENGTH).batch(step, 1) for step in range(60)])
    for batch_size in (3, 4, 10, 12, 30):
        found = torch.cat([Windows(file, LENGTH).batch(step, batch_size) for step in range(60 // batch_size)])
        assert found.equal(expected)


def test_a_batch_depends_on_its_step_and_seed_alone(file):
    in_turn = [Windows(file, LENGTH, seed=3).batch(step, 4) for step in range(20)]
    jumping = Windows(file, LENGTH, seed=3)
    torch.manual_seed(11)
    for step in (17, 3, 9, 0, 12, 2):
        jumping.batch(5, 7)
        assert jumping.batch(step, 4).equal(in_turn[step])
    with torch.device("meta"):
        assert jumping.batch(1, 4).equal(in_turn[1])
    others = [Windows(file, LENGTH, seed=seed).places(0, 10).tolist() for seed in range(5)]
    assert len(set(map(tuple, others))) == 5


def test_steps_are_those_of_the_paper(tmp_path):
    """Four epochs of 130 million tokens in windows of 2,048, 32 at a time: 7,935 steps, batches across epochs."""
    windows = Windows(counting(tmp_path / "tokens", 2 * 63_480), 2)
    assert len(windows) == 130_007_040 // 2048
    assert windows.steps(4, 32) == 7935


def test_all_numbers_of_16_bits(tmp_path):
    windows = Windows(counting(tmp_path / "tokens", 2**16), 2**16)
    assert next(windows.in_order(1))[0].tolist() == list(range(2**16))


def test_mistakes(file):
    with pytest.raises(ValueError, match="^length: expected at most the 107 tokens of .*, got 108"):
        Windows(file, 108)
    with pytest.raises(ValueError, match="^length: expected a whole number of at least 2, got 1"):
        Windows(file, 1)
    with pytest.raises(ValueError, match="^seed: expected a whole number of at least 0, got -1"):
        Windows(file, 10, -1)
    windows = Windows(file, 10)
    with pytest.raises(ValueError, match="^step: expected a whole number of at least 0, got -1"):
        windows.batch(-1, 2)
    with pytest.raises(ValueError, match="^batch_size: expected a whole number of at least 1, got 0"):
        windows.batch(0, 0)
    with pytest.raises(ValueError, match="^batch_size: expected a whole number of at least 1, got 0"):
        windows.in_order(0)
    with pytest.raises(ValueError, match="^epochs: expected a whole number of at least 1, got 0"):
        windows.steps(0, 2)
