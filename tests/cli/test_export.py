"""`mbd export`, as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.models import MemoryConfig, MemoryForCausalLM

pytest.importorskip("onnxruntime")


def mbd(*words: object, code: int = 0):
    result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "140", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path):
    config = MemoryConfig(vocab_size=31, hidden_size=16, num_heads=2, layers=["gated_deltanet"])
    MemoryForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path


def test_it_writes_a_graph_and_says_what_it_did(folder):
    out = folder / "model.onnx"
    printed = mbd("export", folder / "model", out).stdout
    for line in (
        "1 × LinearAttention",
        "4 tensors, past.* and present.*",
        "of the largest logit",
        f"opset 21, to {out}",
    ):
        assert line in printed
    assert "exists already" in mbd("export", folder / "model", out, code=2).stderr
    facts = json.loads(mbd("export", folder / "model", folder / "again.onnx", "--no-check", "--json").stdout)
    assert facts["operators"] == ["LinearAttention"]
    assert facts["inputs"][:2] == ["input_ids", "past.0.memory.mean"]
    assert facts["difference"] is None


def test_mistakes_are_explained(folder):
    nowhere = mbd("export", folder / "model", folder / "no" / "model.onnx", code=2).stderr
    assert "is in a folder that does not exist" in nowhere
    config = MemoryConfig(vocab_size=31, hidden_size=16, num_heads=2, layers=["bayesian_layer", "hyena"])
    MemoryForCausalLM(config).save_pretrained(folder / "hyena")
    error = mbd("export", folder / "hyena", folder / "model.onnx", code=2).stderr
    assert "got layer 1 (hyena): its Fourier transforms" in error
    assert not (folder / "model.onnx").exists()


def test_the_catalogue_says_what_is_exported():
    assert "LinearAttention" in mbd("catalogue", "kda").stdout
    assert "cannot be exported: a step of MesaNet computes" in " ".join(mbd("catalogue", "mesa_net").stdout.split())
    listed = {row["name"]: row["onnx"] for row in json.loads(mbd("catalogue", "--json").stdout)}
    assert listed["bayesian_layer"]["operator"] == "Scan"
    assert listed["low_rank"]["operator"] is None
