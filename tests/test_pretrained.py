"""The small trained models of a checkout: they are found, load without pickles, and do what their cards say."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from membydesign import install, pretrained
from membydesign.cli.app import app
from membydesign.models import MemoryForCausalLM, next_token_losses

ROOT = Path(__file__).parents[1]


def mbd(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200", "TERM": "xterm"})
    assert result.exit_code == code, result.output
    return result


def load(name):
    folder = pretrained.folder(name)
    return MemoryForCausalLM.from_pretrained(folder, dtype="auto").eval(), AutoTokenizer.from_pretrained(folder)


def test_both_are_there_and_small():
    assert pretrained.names() == ["characters", "recall"]
    files = [path for path in (ROOT / pretrained.PLACE).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_500_000
    assert {path.suffix for path in files} == {".safetensors", ".json", ".txt", ".md", ".py"}
    for name in pretrained.names():
        folder = pretrained.folder(f"example:{name}")
        assert folder == ROOT / pretrained.PLACE / name
        card = (folder / "README.md").read_text(encoding="utf-8")
        for part in ("| made by | `python examples/", "| commit | ", "| data | ", "**Limits.**", "**Licence.**"):
            assert part in card, (name, part)
        assert "uncommitted" not in card
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_an_unknown_name_is_explained():
    known = "expected one of example:characters, example:recall, got"
    with pytest.raises(ValueError, match=rf"MODEL: {known} 'example:charactes' \(did you mean 'characters'"):
        pretrained.folder("charactes")
    assert f"{known} 'example:x'" in mbd("generate", "example:x", "hello", code=2).stderr
    stderr = " ".join(mbd("generate", "recall", "hello", code=2).stderr.split())
    assert "example:recall is in this checkout" in stderr


def test_a_copy_without_a_checkout_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrained, "source_folder", lambda: None)
    assert pretrained.names() == []
    stderr = " ".join(mbd("generate", "example:characters", "hello", code=2).stderr.split())
    assert "expected a checkout of memory-by-design" in stderr
    assert "train a model: python examples/characters.py" in stderr


def test_the_checkout_is_the_one_that_was_installed(monkeypatch, tmp_path):
    installed = tmp_path / "lib" / "site-packages" / "membydesign"
    monkeypatch.setattr(install, "_source", lambda: (str(ROOT), False))
    assert install.source_folder(installed) == ROOT
    monkeypatch.setattr(install, "_source", lambda: (str(tmp_path / "gone"), False))
    assert install.source_folder(installed) is None
    monkeypatch.setattr(install, "_source", lambda: ("https://host/code.git", False))
    assert install.source_folder(installed) is None
    assert install.source_folder(ROOT / "src" / "membydesign") == ROOT


@torch.no_grad()
def test_the_recall_model_answers_and_knows_what_it_was_never_told():
    model, tokenizer = load("recall")
    assert model.dtype == torch.float32
    facts = [f"k{3 * i} v{i}" for i in range(10)]
    ids = tokenizer(" ".join([*facts, *facts, "? k3 k12 k1 k50"]), return_tensors="pt").input_ids
    out = model(ids, return_variance=True)
    answers = tokenizer.convert_ids_to_tokens(out.logits[0, -4:-2].argmax(-1).tolist())
    assert answers == ["v1", "v4"]
    variance = out.variances[0][0, -4:, 0, 0]
    assert variance[:2].max() < 0.6 * variance[2:].min()
    found = mbd("generate", "example:recall", "k3 v7 k5 v1 ? k3", "--greedy", "-n", "1", "--json")
    assert json.loads(found.stdout)["text"].strip() == "v7"


@torch.no_grad()
def test_the_character_model_predicts_text_that_it_was_not_trained_on():
    model, tokenizer = load("characters")
    text = (pretrained.folder("characters") / pretrained.TEXT).read_text(encoding="utf-8")
    ids = tokenizer(text[:512], return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text[:512]
    assert next_token_losses(model, {"input_ids": ids}).mean() < 1.6
