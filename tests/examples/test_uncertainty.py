"""examples/uncertainty.py: its task is what it says, and the script runs to the end."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "uncertainty.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("examples_uncertainty", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_the_task_as_a_reader_would_count_it(example, wrong):
    data = example.sequences(6, torch.Generator().manual_seed(0), wrong)
    writes, asked = example.WRITES, example.ASKED
    for i, ids in enumerate(data.ids.tolist()):
        written = list(zip(ids[: 2 * writes : 2], ids[1 : 2 * writes : 2], strict=True))
        assert all(key < example.KEYS <= value < example.KEYS + example.VALUES for key, value in written)
        assert ids[2 * writes] == example.KEYS + example.VALUES
        for n, (key, value) in enumerate(written):
            values = [v for k, v in written[:n] if k == key]
            assert data.before[i, n] == len(values)
            assert wrong or not values or data.answer[i, n] == values[-1]
            assert data.known[i, n] == ((key, value) in written[:n])
        counts = []
        for n in range(writes, writes + asked):
            place = writes + 1 + n
            values = [v for k, v in written if k == ids[place]]
            counts.append(len(values))
            assert data.before[i, n] == len(values)
            if values:
                assert data.since[i, n] == place - max(t for t in range(1, 2 * writes, 2) if ids[t - 1] == ids[place])
                assert wrong or (data.answer[i, n] == values[-1] and len(set(values)) <= 2)
        assert sorted(counts) == example.TIMES.tolist()


def test_some_keys_change_their_value(example):
    data = example.sequences(200, torch.Generator().manual_seed(0), wrong=0.0)
    later = data.before[:, : example.WRITES] > 0
    share = (~data.known & later).sum() / later.sum()
    assert 0.1 < share < 0.2  # half of the nine keys with 33 later writes, once each: 4.5 / 33


def test_auroc(example):
    assert example.auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1
    assert example.auroc(torch.tensor([1.0]), torch.tensor([1.0])) == 0.5
    assert example.auroc(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])) == 0.25
    assert math.isnan(example.auroc(torch.tensor([]), torch.tensor([1.0])))


def test_it_runs(example, tmp_path):
    example.main(["--steps", "2", "--held-out", "12", "--loss", "all", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["losses"]) == 2
    assert sum(v["count"] for v in report["variance"].values()) == 12 * example.ASKED
    assert sum(v["count"] for v in report["evidence"].values()) == 12 * example.WRITES
    assert 0 <= report["auroc_never_written"]["variance"] <= 1
    assert (tmp_path / "uncertainty.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model.safetensors").exists()
