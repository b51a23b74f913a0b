"""Schedules and groups against formulas written out here."""

import math

import pytest
from torch import nn

from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.training import TrainSettings


def settings(**changes):
    return TrainSettings(**{"steps": 1000, "batch_size": 4, "learning_rate": 2e-3, **changes})


def test_the_rate_warms_up_and_follows_a_cosine_to_a_tenth():
    s = settings(warmup=100, final_fraction=0.1)
    assert s.rate(0) == pytest.approx(2e-5)
    assert s.rate(49) == pytest.approx(1e-3)
    assert s.rate(99) == pytest.approx(2e-3)
    assert s.rate(100) == pytest.approx(2e-3)
    assert s.rate(550) == pytest.approx(2e-3 * 0.55)  # half way down, from 1 to 0.1
    assert s.rate(325) == pytest.approx(2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert s.rate(999) == pytest.approx(2e-4, rel=1e-3)


def test_no_schedule_is_a_constant_rate():
    assert {settings().rate(step) for step in range(1000)} == {2e-3}


def test_biases_norms_and_vectors_do_not_decay():
    model = MemoryForCausalLM(
        MemoryConfig(
            vocab_size=16, hidden_size=16, layers="bayesian_layer", num_hidden_layers=1, num_heads=2, head_dim=8
        )
    )
    decayed, kept = settings(weight_decay=0.1).groups(model)
    names = {name.rpartition("layers.0.")[2] for name, _ in kept}
    assert {p.ndim for _, p in decayed} == {2}
    assert {"mixer.o_norm.weight", "mixer.noises.process_noise.bias", "mixer.drift.A_step"} <= names
    assert len(decayed) + len(kept) == len(list(model.parameters()))
    everything, nothing = settings(decayed="all").groups(model)
    assert len(everything) == len(list(model.parameters()))
    assert nothing == []


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    decayed, kept = settings().groups(model)
    assert [name for name, _ in decayed + kept] == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"learning_rate": 0.0}, r"learning_rate: expected a number above 0, got 0\.0"),
        ({"clip": -1.0}, r"clip: expected None or a norm above 0, got -1\.0"),
        ({"warmup": 2000}, "warmup: expected from 0 to steps = 1000, got 2000"),
        ({"final_fraction": 2}, "final_fraction: expected from 0 to 1, got 2"),
        ({"decayed": "some"}, "decayed: expected 'all' or 'matrices', got 'some'"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        settings(**change)
