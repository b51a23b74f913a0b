"""`mbd generate --accelerate`, and the model type for lm-evaluation-harness."""

import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")
from integrations.tiny_models import tiny
from membydesign.cli.app import app
from membydesign.integrations.lm_eval import register
from models.family import fresh_model
from tiny_tokenizers import words_tokenizer


def generated(*words):
    done = CliRunner().invoke(app, ["generate", *map(str, words), "--greedy", "-n", "12"])
    return done


def test_generate(tmp_path, monkeypatch):
    from membydesign.integrations.transformers import delta_rule

    tokenizer = words_tokenizer()
    model = tiny("qwen3_5", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    calls, step = [], delta_rule.native_step
    monkeypatch.setattr(delta_rule, "native_step", lambda *inputs: calls.append(1) or step(*inputs))
    plain = generated(tmp_path / "model", "to be or not to be")
    assert plain.exit_code == 0, plain.output
    assert not calls
    fast = generated(tmp_path / "model", "to be or not to be", "--accelerate")
    assert fast.stdout == plain.stdout
    assert len(calls) == 11

    fresh_model(["bayesian_layer"], vocab_size=len(tokenizer)).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    refused = generated(tmp_path / "ours", "to be", "--accelerate")
    assert refused.exit_code != 0
    assert "--accelerate: model: expected one with layers of" in " ".join(refused.output.split())


def test_lm_eval(monkeypatch):
    """With stand-ins for lm-eval's registry and its `hf`, which are all that is used of it."""
    known = {}

    class HFLM:
        def __init__(self, pretrained):
            self.model = pretrained

    registry, huggingface = ModuleType("lm_eval.api.registry"), ModuleType("lm_eval.models.huggingface")
    registry.register_model = lambda name: lambda kind: known.setdefault(name, kind)  # pyright: ignore
    huggingface.HFLM = HFLM  # pyright: ignore
    for module in (
        ModuleType("lm_eval"),
        ModuleType("lm_eval.api"),
        ModuleType("lm_eval.models"),
        registry,
        huggingface,
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    register()
    lm = known["hf-accelerated"](tiny("mamba2"))
    assert len(lm.acceleration.layers) == 2
    assert all("forward" in vars(lm.model.get_submodule(name)) for name in lm.acceleration.layers)
