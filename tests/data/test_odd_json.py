"""JSON that Python cannot read, or of another form, is an error that names the file, wherever JSON is read."""

from dataclasses import dataclass

import pytest

from membydesign.data.text_files import TextFiles
from membydesign.data.tokenizer import train_tokenizer
from membydesign.evaluation.niah.haystack import read_essays
from membydesign.evaluation.niah.run import read_answers
from membydesign.training import checkpoint
from membydesign.training.checkpoint import CheckpointError
from membydesign.training.sweep import Run, SweepError, sweep
from text_problem import Texts

NESTED = "[" * 100_000
ODD = [NESTED, "[]", "1", "{", '"x"']


@dataclass(frozen=True)
class Settings:
    seed: int = 0


def nothing(_config, _directory, _watch):
    return {}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_texts(tmp_path, name):
    (tmp_path / name).write_text(NESTED)
    with pytest.raises(ValueError, match=f"^path: expected JSON in .*{name}.* nested too deeply"):
        list(TextFiles(tmp_path / name).documents())
    with pytest.raises(ValueError, match=f"^path: expected JSON in|^essays: expected .*{name}|^essays: expected words"):
        read_essays(tmp_path) if name == "a.json" else list(TextFiles(tmp_path).documents())


def test_answers(tmp_path):
    (tmp_path / "samples.jsonl").write_text(NESTED + "\n")
    with pytest.raises(ValueError, match="^file: expected lines with .* got another in line 1"):
        read_answers(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
def test_runs(tmp_path, name, text):
    run = Run("one", Settings(), nothing)
    assert sweep([run], tmp_path) == {"one": {}}
    (tmp_path / "one" / name).write_text(text)
    with pytest.raises(SweepError, match=f"{name}: expected .*remove"):
        sweep([run], tmp_path)


@pytest.mark.parametrize("text", ODD)
def test_checkpoints(tmp_path, text):
    import torch

    model = torch.nn.Linear(2, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path, model, optimiser, {"step": 1})
    (tmp_path / "step-00000001" / "place.json").write_text(text)
    with pytest.raises(CheckpointError, match="expected a complete checkpoint, .* intact .*place.json"):
        checkpoint.read(tmp_path)


def test_tokenizers(tmp_path):
    (tmp_path / "trained_on.json").write_text(NESTED)
    with pytest.raises(ValueError, match="^folder: expected a new folder, or one with a tokenizer trained by this"):
        train_tokenizer(Texts.of("a"), 300, tmp_path)
