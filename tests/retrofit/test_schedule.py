"""How long the phases are, and how Phase B weighs its losses."""

import pytest

from membydesign.retrofit import PHASE_A, LossWeights, PhaseBSchedule, Stage


def test_the_papers_tokens():
    assert PHASE_A.steps == 1_526
    assert 1_526 * 65_536 == 100_007_936 == PHASE_A.tokens
    schedule = PhaseBSchedule()
    assert schedule.first.tokens == 150_077_440
    assert schedule.second.tokens == 150_208_512
    assert schedule.tokens == 150_077_440 + 150_208_512 == 300_285_952 == 4_582 * 65_536


def test_both_stages_are_150_million_tokens_rounded_up_to_their_steps():
    """8 processes with 8, then 16 sequences of 2,048; no one size of step would give both counts."""
    schedule = PhaseBSchedule()
    for stage, sequences in ((schedule.first, 8), (schedule.second, 16)):
        assert stage.tokens_per_step == 8 * sequences * 2048
        assert stage.tokens == -(-150_000_000 // stage.tokens_per_step) * stage.tokens_per_step
    assert (schedule.first.steps, schedule.second.steps, schedule.steps) == (1_145, 573, 1_718)
    assert -(-150_000_000 // 65_536) * 65_536 not in (schedule.first.tokens, schedule.second.tokens)


def test_weights_of_every_step():
    schedule = PhaseBSchedule()
    for step in (0, 1, 1_144):
        assert schedule.weights(step) == LossWeights(0.8, 0.2)
        assert schedule.stage(step) == schedule.first
    for i in range(10):
        weights = schedule.weights(1_145 + i)
        assert weights.kl == pytest.approx(0.8 + 0.01 * (i + 1))
        assert weights.boundary == pytest.approx(0.2 - 0.01 * (i + 1))
        assert schedule.stage(1_145 + i) == schedule.second
    for step in (1_154, 1_155, 1_717):
        assert schedule.weights(step) == LossWeights(0.9, 0.1)


def test_steps_of_one_size():
    schedule = PhaseBSchedule(Stage(150_077_440, 65_536), Stage(150_208_512, 65_536))
    assert (schedule.first.steps, schedule.steps) == (2_290, 4_582)
    assert schedule.weights(2_289) == LossWeights(0.8, 0.2)
    assert schedule.weights(2_290) != LossWeights(0.8, 0.2)
    assert schedule.weights(2_299) == LossWeights(0.9, 0.1)


@pytest.mark.parametrize("ramp", [0, 1])
def test_a_jump(ramp):
    stage = Stage(30, 10)
    schedule = PhaseBSchedule(stage, stage, LossWeights(1, 0), LossWeights(0, 1), ramp)
    assert [schedule.weights(step).boundary for step in range(6)] == [0, 0, 0, 1, 1, 1]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="tokens: expected a multiple of tokens_per_step = 10, got 15"):
        Stage(15, 10)
    with pytest.raises(ValueError, match="tokens_per_step: expected at least 1, got 0"):
        Stage(15, 0)
    with pytest.raises(ValueError, match="ramp: expected from 0 to the second stage's 3 steps, got 4"):
        PhaseBSchedule(Stage(30, 10), Stage(30, 10), ramp=4)
    for step in (-1, 1_718):
        with pytest.raises(ValueError, match=f"step: expected from 0 to 1717, got {step}"):
            PhaseBSchedule().weights(step)
