"""examples/abstaining.py: its curves by hand, a gate that is neutral at first, and a run to the end."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "abstaining.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("examples_abstaining", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_accuracy_by_share(example):
    right = torch.tensor([True, False, True, False])
    confidence = torch.tensor([0.9, 0.2, 0.5, 0.8])
    assert example.accuracy_by_share(right, confidence).tolist() == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    found = example.judged(right, confidence, torch.tensor([True, True, True, False]))
    assert found["area"] == pytest.approx((1 + 1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert found["accuracy_by_share"]["1.0"] == 0.5
    assert found["auroc_right"] == 0.75
    assert found["auroc_written"] == pytest.approx(1 / 3)


def test_the_gate_mixes_the_softmax_with_a_guess(example):
    torch.manual_seed(0)
    model = example.Recall(gated=True)
    ids = example.sequences(2, torch.Generator().manual_seed(0), 0.2).ids
    with torch.no_grad():
        model.gate.weight.fill_(-3.0)
        log_p, log_variance = model(ids)
        out = model.model(ids)
    softmax = example.at_keys(out.logits)[..., example.KEYS : example.KEYS + example.VALUES].softmax(-1)
    gate = torch.sigmoid(2 - 3 * log_variance.sum(-1, keepdim=True))
    torch.testing.assert_close(log_p.exp(), gate * softmax + (1 - gate) / example.VALUES)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(log_p.shape[:-1]))


def test_it_runs_and_continues(example, tmp_path):
    arguments = ["--steps", "2", "--held-out", "10", "--seeds", "1", "--out", str(tmp_path)]
    example.main(arguments)
    kept = (tmp_path / "seed0.json").stat().st_mtime_ns
    example.main([*arguments[:5], "2", *arguments[6:]])
    assert (tmp_path / "seed0.json").stat().st_mtime_ns == kept
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["gated, softmax"]["area"]) == 2
    assert all(0 <= x <= 1 and not math.isnan(x) for x in report["plain, variance"]["auroc_written"])
    assert (tmp_path / "abstaining.png").read_bytes().startswith(b"\x89PNG")
