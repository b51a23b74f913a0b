"""What is written is what is read: weights, configurations, caches, and starting values for what a file lacks."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from membydesign.install import portable_install_hint
from membydesign.layers import LAYERS
from membydesign.models import MemoryCache, MemoryConfig, MemoryForCausalLM, MemoryModel
from membydesign.testing import assert_close
from models.family import FAMILY, cases, fresh_model, model_of, shaken, some_ids, tiny_config


def assert_same_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def logits_of(model, ids=None):
    with torch.no_grad():
        return model(some_ids(2, 9) if ids is None else ids).logits


@cases()
def test_a_saved_model_comes_back(case, tmp_path):
    model = fresh_model(FAMILY[case])
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back) is MemoryForCausalLM
    assert not back.training
    assert_same_weights(back.state_dict(), model.state_dict())
    assert torch.equal(logits_of(back), logits_of(model))


def test_a_saved_model_may_be_in_several_files(tmp_path):
    model = model_of("bayesian_layer")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(MemoryForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())


LOAD = """
import sys
from transformers import AutoModelForCausalLM
assert "membydesign" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
from membydesign.models import MemoryForCausalLM
assert type(model) is MemoryForCausalLM
"""


def test_a_program_that_does_not_import_us_can_load_a_model(tmp_path):
    """Transformers finds the installed package from the folder, copies no code, and saves the same again."""
    model_of("bayesian_layer").save_pretrained(tmp_path / "one")
    cache = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", LOAD, str(tmp_path / "one"), str(tmp_path / "two")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **cache})
    assert done.returncode == 0, done.stderr
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    assert set(files[0]) == {"config.json", "generation_config.json", "memory_by_design.py", "model.safetensors"}


def test_the_code_beside_a_model_is_this_package_whatever_a_file_says(tmp_path, monkeypatch):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoConfig"] == "memory_by_design.MemoryConfig"
    written["auto_map"] = {"AutoConfig": "somewhere--else.Other"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).auto_map == config.auto_map
    MemoryConfig.register_for_auto_class()
    config.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"config.json", "memory_by_design.py"}
    monkeypatch.setitem(sys.modules, "membydesign.models", None)
    with pytest.raises(ImportError, match=re.escape(portable_install_hint("models"))):
        exec((tmp_path / "memory_by_design.py").read_text(), {})


def test_auto_classes_know_the_family(tmp_path):
    model = model_of("bayesian_layer")
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MemoryConfig)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is MemoryModel
    assert_same_weights(base.state_dict(), model.model.state_dict())
    assert type(AutoModelForCausalLM.from_config(model.config)) is MemoryForCausalLM


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    model = fresh_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embeddings.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    back = MemoryForCausalLM.from_pretrained(tmp_path)
    assert back.lm_head.weight is back.model.embeddings.weight
    assert torch.equal(logits_of(back), logits_of(model))


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_file_lacks_gets_its_starting_value(name, tmp_path):
    """Of the second block, nothing but a linear map was saved; all that was saved stays as it was."""
    torch.manual_seed(0)
    started = MemoryForCausalLM(tiny_config(name))
    model = shaken(copy.deepcopy(started))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    second = [key for key in weights if key.startswith("model.layers.1.mixer.")]
    lost = {key for key in second if not key.endswith("o_proj.weight")}
    save_file({key: value for key, value in weights.items() if key not in lost}, file, {"format": "pt"})
    loaded: Any = MemoryForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    back, report = loaded
    assert set(report["missing_keys"]) == lost
    values, first = back.state_dict(), started.state_dict()
    for key, value in values.items():
        if key not in lost:
            assert torch.equal(value, weights[key]), key
        else:
            assert torch.isfinite(value).all(), key
            if first[key].numel() > 64 and first[key].std() > 0:  # drawn at random: alike, but not the same
                assert 0.5 < value.std() / first[key].std() < 2, key
                assert abs(value.mean() - first[key].mean()) < 0.3 * (first[key].std() + first[key].mean().abs()), key
            elif first[key].std() == 0 or key.rpartition(".")[2] in ("A_step", "A_angle", "A_radius"):
                assert torch.equal(value, first[key]), key


def test_part_of_a_module_may_be_missing(tmp_path):
    """A drift whose step was saved and whose spectrum was not: the one is kept, the other starts anew."""
    model = fresh_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    radius = "model.layers.0.mixer.drift.A_radius"
    save_file({key: value for key, value in weights.items() if key != radius}, file, {"format": "pt"})
    values = MemoryForCausalLM.from_pretrained(tmp_path).state_dict()
    assert not values.pop(radius).any()
    assert_same_weights(values, {key: weights[key] for key in values})


def test_a_model_without_storage_has_shapes_and_can_be_filled():
    with torch.device("meta"):
        model = MemoryForCausalLM(tiny_config())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).logits.shape == (2, 5, 61)
    wanted = model_of("bayesian_layer")
    model.load_state_dict(wanted.state_dict(), assign=True)
    assert torch.equal(logits_of(model.eval()), logits_of(wanted))


@pytest.mark.parametrize("name", LAYERS)
def test_starting_values_follow_the_seed(name):
    torch.manual_seed(3)
    first = MemoryForCausalLM(tiny_config(name)).state_dict()
    torch.manual_seed(3)
    assert_same_weights(MemoryForCausalLM(tiny_config(name)).state_dict(), first)
    torch.manual_seed(4)
    other = MemoryForCausalLM(tiny_config(name)).state_dict()
    assert any(not torch.equal(other[key], value) for key, value in first.items())
    for key, value in first.items():
        if key.endswith("_proj.weight"):
            assert 0.8 * 0.02 < value.std() < 1.2 * 0.02, key


@cases()
def test_a_configuration_is_json(case, tmp_path):
    config = model_of(case).config
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "memory_by_design"
    back = AutoConfig.from_pretrained(tmp_path)
    again = MemoryConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    for found in (back.to_dict(), again.to_dict()):
        for key, value in config.to_dict().items():
            assert key == "_name_or_path" or found[key] == value, key


def test_options_of_layers_survive_json(tmp_path):
    noises = {"process_noise": {"learned": 0.1}, "write_noise": 0.3, "groups": 2, "transition": "rotation"}
    config = tiny_config("bayesian_layer", layer_options={"bayesian_layer": {**noises, "short_convolution": 3}})
    model = shaken(MemoryForCausalLM(config))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(MemoryForCausalLM.from_pretrained(tmp_path)), logits_of(model))


@cases()
def test_models_are_copied_and_pickled(case):
    model = model_of(case)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(other), logits_of(model))
        assert next(other.parameters()) is not next(model.parameters())


@cases()
def test_a_conversation_goes_on_from_a_saved_cache(case, tmp_path):
    model, ids = model_of(case), some_ids(2, 20)
    with torch.no_grad():
        whole = model(ids).logits
        model(ids[:, :12]).past_key_values.save(tmp_path / "memory.safetensors")
        memory = MemoryCache.load(tmp_path / "memory.safetensors")
        assert (memory.get_seq_length(), memory.layers[0].batch_size) == (12, 2)
        assert_close(model(ids[:, 12:], past_key_values=memory).logits, whole[:, 12:], 1e-4)


@cases()
def test_a_cache_branches(case):
    """Also one that gradients go through, which tensors by themselves would refuse."""
    model, ids, other = model_of(case), some_ids(2, 12), some_ids(2, 6, seed=9)
    memory = model(ids).past_key_values
    branch = copy.deepcopy(memory)
    on = model(other, past_key_values=branch).logits
    assert (memory.get_seq_length(), branch.get_seq_length()) == (12, 18)
    assert_close(model(other, past_key_values=memory).logits, on, 1e-6)
    assert_close(on, model(torch.cat((ids, other), 1)).logits[:, 12:], 1e-4)


def test_an_empty_cache_is_saved_too(tmp_path):
    MemoryCache(3).save(tmp_path / "memory.safetensors")
    memory = MemoryCache.load(tmp_path / "memory.safetensors")
    assert (len(memory), memory.get_seq_length()) == (3, 0)
