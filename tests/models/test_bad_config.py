"""What cannot work is refused with the argument, what was expected, and what came."""

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from membydesign.layers import LAYERS
from membydesign.models import MemoryCache, MemoryConfig
from models.family import fresh_model, model_of, some_ids

IDS = some_ids(2, 5)
FORM = re.compile(r"^[a-z_.]+: .*expected .+, got .+", re.DOTALL)
"""argument: expected …, got …"""


def refused(wanted: str):
    """A ValueError of the form, that has these parts in this order."""
    return pytest.raises(ValueError, match=rf"(?s)(?={FORM.pattern})^" + ".*".join(map(re.escape, wanted.split("…"))))


def bayesian(**options) -> dict:
    return {"layer_options": {"bayesian_layer": options}}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"num_heads": 5}, "num_heads: expected a divisor of hidden_size = 32…got 5"),
        ({"num_heads": 0}, "num_heads: expected a whole number of at least 1, got 0"),
        ({"num_heads": "4"}, "num_heads: expected a whole number of at least 1, got '4'"),
        ({"head_dim": 0}, "head_dim: expected a whole number of at least 1, got 0"),
        ({"hidden_size": 0}, "hidden_size: expected a whole number of at least 1, got 0"),
        ({"vocab_size": 0}, "vocab_size: expected a whole number of at least 1, got 0"),
        ({"layers": []}, "num_hidden_layers: expected a whole number of at least 1, got 0"),
        ({"layers": "nope"}, "layers: expected names among bayesian_layer, …gla_style…, got 'nope'"),
        ({"layers": ["bayesian_layer", "nope"]}, "layers: expected names among …, got 'nope'"),
        ({"num_hidden_layers": 3}, "layers: expected one name, or num_hidden_layers = 3 names, got 2"),
        ({"intermediate_size": -1}, "intermediate_size: expected a whole number of at least 0, got -1"),
        ({"mlp_dropout": 1.0}, "mlp_dropout: expected a number from 0 to below 1, got 1.0"),
        ({"norm_eps": 0.0}, "norm_eps: expected a number above 0, got 0.0"),
        ({"initializer_range": -0.02}, "initializer_range: expected a number above 0, got -0.02"),
        ({"pad_token_id": 61}, "pad_token_id: expected one below vocab_size = 61, got 61"),
        (bayesian(groups=3), "value_dim: expected M divisible by the design's 3 noise groups, got 16"),
        (bayesian(groups=2, value_dim=9), "value_dim: expected M divisible by the design's 2 noise groups, got 9"),
        (bayesian(transition="rotation", head_dim=7), "head_dim: expected an even D…got 7"),
        (bayesian(transition="sideways"), "transition: expected one of identity, scalar, …got 'sideways'"),
        (bayesian(num_heads=0), "num_heads: expected a whole number of at least 1, got 0"),
        (bayesian(colour=1), "colour: expected an option of bayesian_layer (value_dim, …groups…), got colour=1"),
        (bayesian(hidden_size=4), "layer_options: expected hidden_size = 32 from the model alone, got …4"),
        (bayesian(write_noise=-1), "write_noise: expected …, got -1"),
        (bayesian(process_noise={"x": 1}), "process_noise: expected …, got {'x': 1}"),
        (bayesian(prior_variance=1.0), "prior_variance: expected None, …got 1.0"),
        (bayesian(short_convolution=-1), "short_convolution: expected a whole number of at least 1, got -1"),
        (
            {"layers": "rwkv7", "layer_options": {"rwkv7": {"value_residual": True}}, "num_hidden_layers": 2},
            "layer_options: expected no value_residual for rwkv7, …got True",
        ),
        (
            {"layer_options": {"bayesian_layer": 3}},
            "layer_options: expected a dict of options of bayesian_layer, got 3",
        ),
        (
            {"layer_options": {"gla_style": {}}},
            "layer_options: expected names among layers ['bayesian_layer'], got 'gla",
        ),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(change, wanted):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_heads": 2, "layers": ["bayesian_layer"] * 2}
    with refused(wanted):
        MemoryConfig(**{**sizes, **change})


def test_an_unknown_layer_is_answered_with_all_names():
    with pytest.raises(ValueError, match="^layers: ") as error:
        MemoryConfig(layers="nope")
    assert all(name in str(error.value) for name in LAYERS)


def test_an_odd_head_cannot_rotate():
    with refused("head_dim: expected an even D…got 7"):
        MemoryConfig(hidden_size=32, num_heads=2, head_dim=7, layers="bayesian_layer_rotating")


CONVOLVED: dict[str, Any] = {"layer_options": {"bayesian_layer": {"short_convolution": 4}}}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (
            {"layers": ["bayesian_layer"] * 3},
            "past_key_values: expected a MemoryCache of 2 layers, got one of 3 layers",
        ),
        ({"hidden_size": 64}, "layer 0: …mean: expected shape [2, 2, 16, 16]…got shape [2, 2, 32, 32]"),
        ({"num_heads": 4}, "layer 0: …mean: expected shape [2, 2, 16, 16]…got shape [2, 4, 8, 8]"),
        ({"layers": "bayesian_layer_diagonal"}, "layer 0: …covariance: expected shape …got shape [2, 2, 1, 16]"),
        ({"layers": "gated_deltanet_style"}, "layer 0: …covariance: expected a tensor …got None"),
        ({"layers": ["bayesian_layer", "gla_style"]}, "layer 1: …covariance: expected a tensor …got None"),
        (CONVOLVED, "layer 0: belief.tails: expected 0 elements per sequence, …got 288"),
    ],
    ids=str,
)
def test_the_cache_of_another_model_is_refused(other, wanted, tokens):
    memory = fresh_model(**other)(some_ids(2, 4)).past_key_values
    with refused(wanted if wanted.startswith("past") else f"past_key_values: expected a cache of this model; {wanted}"):
        model_of("bayesian_layer")(IDS[:, :tokens], past_key_values=memory)


def test_a_cache_without_what_a_model_needs_is_refused():
    memory = model_of("bayesian_layer")(IDS).past_key_values
    with refused("past_key_values: expected …layer 0: belief.tails: expected 288 elements per sequence, …got 0"):
        fresh_model(**CONVOLVED)(IDS, past_key_values=memory)
    memory = model_of("bayesian_layer")(IDS).past_key_values
    with refused("past_key_values: expected …layer 0: …covariance: expected None, …got a tensor"):
        model_of("gated_deltanet_style")(IDS, past_key_values=memory)


def test_the_cache_of_another_batch_is_refused():
    memory = model_of("bayesian_layer")(some_ids(3, 4)).past_key_values
    with refused("past_key_values: expected …layer 0: belief: expected one of 2 sequences, as x has, got one of 3"):
        model_of("bayesian_layer")(IDS, past_key_values=memory)


def test_other_classes_of_cache_are_refused():
    model = model_of("bayesian_layer")
    with refused("past_key_values: expected a MemoryCache of 2 layers, got DynamicCache"):
        model(IDS, past_key_values=DynamicCache())
    with refused("past_key_values: expected a MemoryCache of 2 layers, got DynamicCache"):
        model.generate(IDS, max_new_tokens=2, past_key_values=DynamicCache(), pad_token_id=0)
    with refused("past_key_values: expected a MemoryCache of 2 layers, got tuple"):
        model(IDS, past_key_values=((1, 2), (3, 4)))


def test_a_cache_cannot_be_cropped_or_given_keys():
    memory = model_of("bayesian_layer")(IDS).past_key_values
    memory.crop(0)
    with refused("crop: expected 0, since a belief cannot forget its last tokens …got 2"):
        memory.crop(2)
    with pytest.raises(TypeError, match="keeps beliefs, not keys and values"):
        memory.update(torch.zeros(1), torch.zeros(1), 0)


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    model_of("bayesian_layer").save_pretrained(tmp_path)
    with refused("path: expected a file that MemoryCache.save wrote, got …model.safetensors"):
        MemoryCache.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (torch.ones(2, 4), "[B,T] = [2,5], got [2, 4]"),
        (torch.ones(2, 6), "[B,T] = [2,5], got [2, 6]"),
        (torch.ones(1, 5), "[B,T] = [2,5], got [1, 5]"),
        (torch.ones(2, 1, 5, 5), "[B,T] = [2,5], got [2, 1, 5, 5]"),
        ([[1] * 5] * 2, "[B,T] = [2,5], got list"),
        (torch.zeros(2, 5), "expected at least one token that is not padding, got none"),
    ],
    ids=["short", "long", "another batch", "four axes", "list", "all padding"],
)
def test_a_bad_mask_is_refused(mask, wanted):
    with refused(f"attention_mask: …{wanted}"):
        model_of("bayesian_layer")(IDS, mask)


def test_the_mask_of_a_continuation_covers_all_tokens_or_the_new_ones():
    model = model_of("bayesian_layer")
    memory = model(some_ids(2, 4)).past_key_values
    with refused(
        "attention_mask: expected shape [B,T] = [2,5] or, with the 4 tokens of past_key_values, [2,9], got [2, 7]"
    ):
        model(IDS, torch.ones(2, 7), past_key_values=memory)


@pytest.mark.parametrize("options", [{}, CONVOLVED], ids=["plain", "convolved"])
@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        (torch.tensor([0, 3]), "boundaries from 0 to T = 5, got from 0 to 3"),
        (torch.tensor([1, 5]), "boundaries from 0 to T = 5, got from 1 to 5"),
        (torch.tensor([0, 4, 3, 5]), "boundaries that never decrease, got 4, 3 at index 1"),
        (torch.tensor([0.0, 5.0]), "int32 or int64, got torch.float32"),
        (torch.tensor(5), "shape [N+1] for N packed sequences, got shape []"),
        ([0, 5], "a 1-D integer tensor of boundaries, got list"),
    ],
    ids=str,
)
def test_bad_boundaries_are_refused(options, bounds, wanted):
    with refused(f"cu_seqlens: expected {wanted}"):
        fresh_model(**options)(IDS[:1], cu_seqlens=bounds)


def test_packing_needs_one_row_and_no_padding():
    model = model_of("bayesian_layer")
    with refused("cu_seqlens: expected B = 1, …got B = 2"):
        model(IDS, cu_seqlens=torch.tensor([0, 5]))
    with refused("attention_mask: expected no padding with cu_seqlens, got some"):
        model(IDS[:1], torch.tensor([[0, 1, 1, 1, 1]]), cu_seqlens=torch.tensor([0, 2, 5]))


def test_bad_tokens_and_labels_are_refused():
    model = model_of("bayesian_layer")
    with refused("input_ids: expected exactly one of input_ids and inputs_embeds, got both"):
        model(IDS, inputs_embeds=torch.zeros(2, 5, 32))
    with refused("input_ids: expected exactly one of input_ids and inputs_embeds, got neither"):
        model()
    with refused("input_ids: expected shape [B,T] with T at least 1, got [5]"):
        model(IDS[0])
    with refused("input_ids: expected shape [B,T] with T at least 1, got [2, 0]"):
        model(IDS[:, :0])
    with refused("inputs_embeds: expected shape [B,T,32] (hidden_size) with T at least 1, got [2, 5, 31]"):
        model(inputs_embeds=torch.zeros(2, 5, 31))
    with refused("labels: expected one for each of the logits, [2, 5], got [2, 3]"):
        model(IDS, labels=IDS[:, :3])
    with refused("labels: expected one for each of the logits, [2, 1], got [2, 5]"):
        model(IDS, labels=IDS, logits_to_keep=1)
