"""The character model of docs/start/first-model.md, with a handful of steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import membydesign.models

SCRIPT = Path(__file__).parents[2] / "examples" / "characters.py"
TINY = ("--steps", "3", "--batch", "2", "--length", "64", "--hidden-size", "16", "--characters", "9")


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["bayesian_layer", "bayesian_layer,attention"])
def test_it_trains_writes_and_saves(tmp_path, layers):
    words = [sys.executable, "-W", "error", str(SCRIPT), *TINY, "--layers", layers, "--out", str(tmp_path)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert "held-out loss" in run.stdout
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(model, membydesign.models.MemoryForCausalLM)
    assert model.config.layers == [*layers.split(",")] * (4 // len(layers.split(",")))
    text = 'for x in "a b":\n    print(x)\n'
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 3
