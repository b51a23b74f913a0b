"""Model folders that others wrote: whatever their files hold, errors name it at once, and nothing in them is run."""

import json
import pickle
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import fla_checkpoints as fla
from membydesign.models import MemoryConfig, MemoryForCausalLM, load_fla

ODD = ["x", "", "1", -1, 0, 1.5, 10**9, 10**30, float("nan"), float("inf"), True, None, [], [1], [[1]], {}, {"a": 1}]
READ = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "head_dim", "expand_v", "use_gate"),
    *("use_short_conv", "conv_size", "norm_eps", "hidden_ratio", "intermediate_size", "tie_word_embeddings"),
    *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "attn", "hidden_act"),
]
OURS = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "layers", "num_heads", "num_attention_heads", "head_dim"),
    *("layer_options", "layer_modules", "intermediate_size", "mlp_dropout", "norm_eps", "initializer_range"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
]
NESTED = ["[" * 100_000, '{"model_type":' * 100_000]


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def refused_or_read(load) -> str:
    """The error, if there is one, which must be a ValueError and come soon."""
    start = time.process_time()
    try:
        load()
        return ""
    except ValueError as error:
        return str(error)
    finally:
        assert time.process_time() - start < 5


@pytest.fixture
def theirs(tmp_path):
    return fla.write(tmp_path, fla.SMALL, fla.tensors(fla.SMALL, december=True))


@pytest.fixture
def ours(tmp_path):
    MemoryForCausalLM(MemoryConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_heads=2)).save_pretrained(
        tmp_path
    )
    return tmp_path


@pytest.mark.parametrize("field", READ)
def test_odd_values_in_a_foreign_config(theirs, field):
    for value in ODD:
        (theirs / "config.json").write_text(json.dumps({**fla.SMALL, field: value}))
        error = refused_or_read(lambda: load_fla(theirs))
        assert not error or field in error or "expected the tensors of" in error, (value, error)


def test_strings_for_numbers_are_not_read(theirs):
    (theirs / "config.json").write_text(json.dumps({**fla.SMALL, "expand_v": "1", "use_gate": "false"}))
    with pytest.raises(ValueError, match=r"(?s)expand_v: expected a number above 0, got '1'.*use_gate: expected true"):
        load_fla(theirs)


def test_too_many_layers_are_refused_at_once(theirs):
    for layers in (100_000, 10**9):
        (theirs / "config.json").write_text(json.dumps({**fla.SMALL, "num_hidden_layers": layers}))
        assert "num_hidden_layers: expected at most " in refused_or_read(lambda: load_fla(theirs))


def test_too_many_layers_of_ours_are_refused_at_once(ours):
    config = json.loads((ours / "config.json").read_text())
    for layers in (100_000, 10**9):
        changed = {**config, "layers": "bayesian_layer", "num_hidden_layers": layers}
        (ours / "config.json").write_text(json.dumps(changed))
        error = refused_or_read(lambda: MemoryForCausalLM.from_pretrained(ours))
        assert "num_hidden_layers: expected at most" in error


@pytest.mark.parametrize("field", OURS)
def test_odd_values_in_a_config_of_ours(field):
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2}
    for value in ODD:
        if field == "num_hidden_layers" and type(value) is int and value > 100:
            continue  # checked with the tensors of a folder
        refused_or_read(lambda: MemoryConfig.from_dict({**small, field: value}))  # noqa: B023


@pytest.mark.parametrize(
    "weight_map", [1, [], "x", None, {"a": 1}, {"a": [1]}, {"a": None}, {"a": ""}, {"a": "x\0y"}, {"a": "x" * 5000}]
)
def test_odd_indices_of_shards(theirs, weight_map):
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map" in (error := refused_or_read(lambda: load_fla(theirs))) or "index.json names" in error


@pytest.mark.parametrize("text", [*NESTED, "1", "[]", "null", "\udcff"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_files_that_are_no_objects_are_named(theirs, name, text):
    (theirs / name).write_text(text, errors="surrogateescape")
    assert name in refused_or_read(lambda: load_fla(theirs))


@pytest.mark.parametrize("text", [*NESTED, "1", "[]", "{"])
def test_odd_generation_configs_are_left_out(theirs, text):
    (theirs / "generation_config.json").write_text(text)
    with pytest.warns(UserWarning, match="generation_config.json is left out"):
        load_fla(theirs)


@pytest.mark.parametrize("text", [*NESTED, "[]", "1"])
def test_our_models_name_their_config(ours, text):
    (ours / "config.json").write_text(text)
    assert "config.json" in refused_or_read(lambda: MemoryForCausalLM.from_pretrained(ours))


def test_code_in_the_folder_is_not_run_once_we_are_imported(ours, monkeypatch):
    ran = ours / "ran"
    (ours / "memory_by_design.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to Transformers' question
    assert type(AutoModelForCausalLM.from_pretrained(ours)) is MemoryForCausalLM
    assert not ran.exists()


def test_pickles_of_our_models_are_not_opened(ours):
    (ours / "model.safetensors").unlink()
    (ours / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"got only pytorch_model.bin: .*convert it once: python -c \"import torch"):
        MemoryForCausalLM.from_pretrained(ours)


def test_the_command_that_converts_pickles_works(ours, monkeypatch):
    from membydesign.models.checkpoint import CONVERT_PICKLE

    model = MemoryForCausalLM.from_pretrained(ours)
    (ours / "model.safetensors").unlink()
    torch.save(model.state_dict(), ours / "pytorch_model.bin")
    monkeypatch.chdir(ours)
    code = CONVERT_PICKLE.format(file="pytorch_model.bin").removeprefix('python -c "').removesuffix('"')
    exec(code, {})
    again = MemoryForCausalLM.from_pretrained(ours)
    assert all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
