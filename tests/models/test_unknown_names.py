"""Names that nobody knows are refused with what may have been meant; what Transformers passes keeps working."""

import json
import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from membydesign.models import MemoryConfig as TypedConfig
from membydesign.models import MemoryForCausalLM
from models.family import VOCABULARY, fresh_model, model_of, some_ids, tiny_config

IDS = some_ids(2, 5)
MemoryConfig: Any = TypedConfig  # called with what its types refuse


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_layers", "num_hidden_layers"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("n_layer", "num_hidden_layers"),
        ("hiden_size", "hidden_size"),
        ("d_model", "hidden_size"),
        ("n_head", "num_heads"),
        ("layer", "layers"),
        ("layer_types", "layers"),
        ("rms_norm_eps", "norm_eps"),
        ("tie_embeddings", "tie_word_embeddings"),
    ],
)
def test_a_misspelt_argument_of_a_configuration_is_refused(name, meant):
    wanted = rf"^{name}: expected an argument of MemoryConfig \(did you mean {meant}\?.*got {name}=6$"
    with pytest.raises(ValueError, match=wanted):
        MemoryConfig(**{name: 6})


def test_an_option_of_a_layer_belongs_to_the_options_of_layers():
    with pytest.raises(ValueError, match="^short_convolution: .*layer_options.*got short_convolution=4$"):
        MemoryConfig(short_convolution=4)
    with pytest.raises(ValueError, match="^zzz: expected an argument of MemoryConfig .*got zzz=1$") as error:
        MemoryConfig(zzz=1)
    assert "did you mean" not in str(error.value)


def test_what_transformers_gives_to_configurations_is_taken():
    common = {"architectures": ["MemoryForCausalLM"], "dtype": "bfloat16", "pad_token_id": 3, "num_labels": 4}
    more = {"output_attentions": True, "tokenizer_class": "Some", "name_or_path": "here", "use_cache": False}
    generation = {"max_length": 20, "temperature": 0.5, "sep_token_id": 1, "decoder_start_token_id": 2}
    config = MemoryConfig(**common, **more, **generation, attn_implementation="sdpa", _commit_hash="0")
    assert (config.dtype, config.num_labels, config.tokenizer_class) == (torch.bfloat16, 4, "Some")
    config = tiny_config(["bayesian_layer", "attention"])
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()
    assert AutoConfig.for_model("memory_by_design", hidden_size=32).hidden_size == 32


def test_the_heads_have_two_names():
    """Transformers' name sets the size of a head just as ours does."""
    config = MemoryConfig(hidden_size=64, num_attention_heads=8)
    assert (config.num_heads, config.num_attention_heads, config.head_dim) == (8, 8, 8)
    with pytest.raises(ValueError, match="^num_attention_heads: expected num_heads = 2, .*got 8"):
        MemoryConfig(hidden_size=64, num_heads=2, num_attention_heads=8)


def test_a_file_of_another_version_loads_with_a_warning(tmp_path):
    model_of("bayesian_layer").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "of_tomorrow": 3, "num_layer": 1}))
    found: Any = None
    for load in (AutoConfig.from_pretrained, MemoryConfig.from_pretrained, MemoryForCausalLM.from_pretrained):
        with pytest.warns(UserWarning, match=r"of_tomorrow, num_layer.*without effect.*another version"):
            found = load(tmp_path)
    with pytest.warns(UserWarning, match="of_tomorrow"):
        config = MemoryConfig.from_json_file(file)
    assert config.of_tomorrow == 3
    assert json.loads(config.to_json_string())["of_tomorrow"] == 3
    assert torch.equal(found(IDS).logits, model_of("bayesian_layer")(IDS).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MemoryConfig.from_dict(tiny_config().to_dict())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("retrun_variance", "return_variance"),
        ("return_evidences", "return_evidence"),
        ("attn_mask", "attention_mask"),
        ("past_key_value", "past_key_values"),
    ],
)
def test_a_misspelt_argument_of_a_call_is_refused(name, meant):
    model = model_of("bayesian_layer")
    for call, kind in ((model, "MemoryForCausalLM"), (model.model, "MemoryModel")):
        wanted = rf"^{name}: expected an argument of {kind} \(did you mean {meant}\?\), got {name}=True$"
        with pytest.raises(ValueError, match=wanted):
            call(IDS, **{name: True})
        assert torch.equal(call(IDS, **{name: None})[0], call(IDS)[0])


def test_the_base_model_takes_no_labels():
    with pytest.raises(ValueError, match="^labels: expected an argument of MemoryModel"):
        model_of("bayesian_layer").model(IDS, labels=IDS)


def test_what_transformers_passes_to_calls_is_taken():
    model = model_of("bayesian_layer")
    passed = {"cache_position": torch.arange(5), "token_type_ids": IDS * 0, "output_attentions": False}
    passed |= {"output_router_logits": False, "is_causal": True, "return_dict": True, "max_length_q": 5}
    for call in (model, model.model):
        assert torch.equal(call(IDS, **passed)[0], call(IDS)[0])
    summed = model(IDS, labels=IDS, num_items_in_batch=2, ignore_index=-100).loss
    assert torch.allclose(summed, model(IDS, labels=IDS).loss * 4)
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(IDS, labels=IDS, shift_labels=shifted).loss, model(IDS, labels=IDS).loss)


def test_what_a_tokenizer_returns_can_be_passed_on():
    """Tokenizers of Transformers return token types unless told not to."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")("w5 w9 w30", return_tensors="pt")
    tokens["token_type_ids"] = torch.zeros_like(tokens["input_ids"])
    model = fresh_model()
    assert torch.equal(model(**tokens).logits, model(tokens["input_ids"]).logits)
    greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(**tokens, **greedy).equal(model.generate(tokens["input_ids"], **greedy))
