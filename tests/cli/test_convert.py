"""`mbd convert`, as a user types it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import fla_checkpoints as fla
from membydesign.cli.app import app
from membydesign.models import MemoryForCausalLM, load_fla


def mbd(*words: object, code: int = 0):
    result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "140", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def source(tmp_path):
    folder = fla.write(tmp_path / "theirs", fla.SMALL, fla.tensors(fla.SMALL, december=True, dtype=torch.float32))
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md", "modeling.py"):
        (folder / name).write_text("{}")
    return folder


def test_help_teaches():
    assert "mbd convert linear-moe-hub/Gated-Deltanet-340M" in mbd("convert", "--help").output


def test_it_writes_a_model_of_ours_and_says_what_it_did(source, tmp_path):
    ours = tmp_path / "some" / "where"
    output = mbd("convert", source, ours).stdout
    for line in (
        "39 tensors, 2,866 elements stored",
        "2 × model.layers.*.attn.D, 4 elements: no version of the layer ever read it",
        "lm_head.weight, 372 elements: equals model.embeddings.weight, which it is tied to",
        f"2,490 parameters, float32, to {ours}",
        "tokenizer.json, tokenizer_config.json",
        f"mbd generate {ours}",
    ):
        assert line in output
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(MemoryForCausalLM.from_pretrained(ours)(tokens).logits, load_fla(source)(tokens).logits)
    assert {file.name for file in ours.iterdir()} == {
        *("config.json", "generation_config.json", "memory_by_design.py", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert {file.name for file in ours.parent.iterdir()} == {"where"}


def test_json_and_types(source, tmp_path):
    (tmp_path / "ours").mkdir()  # an empty folder is as good as none
    facts = json.loads(mbd("convert", source, tmp_path / "ours", "--dtype", "bfloat16", "--json").stdout)
    assert (facts["tensors"], facts["elements"], facts["parameters"]) == (39, 2866, 2490)
    assert facts["dtype"] == "bfloat16"
    assert facts["tied"] is True
    assert [skipped["name"] for skipped in facts["skipped"]][-1] == "lm_head.weight"
    assert MemoryForCausalLM.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


def test_a_head_that_is_not_tied_is_mentioned(source, tmp_path):
    weights = fla.tensors(fla.SMALL, december=True)
    weights["lm_head.weight"] = 2 * weights["lm_head.weight"]
    fla.write(source, fla.SMALL, weights)
    assert "loaded as untied" in mbd("convert", source, tmp_path / "ours").stdout


def test_mistakes_are_explained(source, tmp_path):
    ours = tmp_path / "ours"
    assert "got no such folder" in mbd("convert", tmp_path / "nowhere", ours, code=2).stderr
    assert "--dtype: expected one of float64" in mbd("convert", source, ours, "--dtype", "int8", code=2).stderr
    assert "has something in it" in mbd("convert", source, source, code=2).stderr
    assert "has something in it" in mbd("convert", source, source / "config.json", code=2).stderr
    (source / "config.json").write_text(json.dumps({**fla.SMALL, "surprise": 1}))
    assert "surprise: expected no such option" in mbd("convert", source, ours, code=2).stderr
    mbd("convert", source, tmp_path / "ignored", "--ignore", "surprise")
    (source / "config.json").write_text(json.dumps({**fla.SMALL, "num_hidden_layers": 3}))
    error = mbd("convert", source, ours, code=2).stderr
    assert "SRC: expected the tensors" in error
    assert "model.layers.2.attn.q_proj.weight [10, 12]" in error
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "got only pytorch_model.bin" in mbd("convert", source, ours, code=2).stderr
    assert not ours.exists()
