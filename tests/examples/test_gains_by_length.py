"""examples/gains_by_length.py: gains far beyond the training length, with stationary and with free process noise."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "gains_by_length.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("examples_gains_by_length", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gains_at_64_times_the_training_length(example):
    """Stationary drift never writes more strongly than in training; free process noise does, a fifth of the time."""
    results = example.compare(train=64, times=(1, 64), batch=24)
    free, stationary = (results[title][-1] for title in example.LAYERS)
    assert stationary.above < 0.05 < 0.2 < free.above
    assert stationary.distance < free.distance
    assert stationary.largest_variance <= 1 + 1e-4
    assert free.largest_variance > 4 * results["free process noise"][0].largest_variance


def test_gains_are_what_the_filter_used(example):
    """p = r² × gain: for the first write of a text, the prior's own gain, σ²/(σ² + r²) with r² = 0.5."""
    texts = example.text(1, 1, 64, torch.Generator().manual_seed(0), share=1.0)
    layer = example.make_layer("stationary_bayesian_layer", 64, num_heads=4, head_dim=32)
    (window,) = example.gains_by_length(layer, texts, 1, (1,))
    assert window.quantiles == pytest.approx([1 / 1.5] * 3, abs=1e-4)


def test_distance_of_distributions(example):
    a = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert example.distance(a, a) == 0
    assert example.distance(a, a + 1) == 1
    assert example.distance(a, torch.tensor([0.15, 0.25, 0.35, 0.45])) == pytest.approx(0.25)


def test_the_script_prints_json(example, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gains_by_length.py", "--train", "16", "--times", "1", "2", "--json"])
    example.main()
    printed = json.loads(capsys.readouterr().out)
    assert [window["times"] for window in printed["stationary drift"]] == [1, 2]
