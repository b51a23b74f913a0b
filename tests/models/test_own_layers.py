"""A layer of a user's own in a model: starting values, training beside built-in layers, saving and loading."""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membydesign.layers import LayerBelief, LayerStateSize, SequenceLayer, register, registry
from membydesign.models import MemoryCache, MemoryConfig, MemoryForCausalLM
from models.family import tiny_config

START = 0.75


@dataclass(frozen=True)
class Average(LayerBelief):
    average: Tensor


class Smoother(SequenceLayer):
    """y_t = W a_t with a_t = ρ a_{t-1} + (1 - ρ) x_t; ρ, one for each channel, is a weight of the layer's own."""

    def __init__(self, hidden_size, num_heads, head_dim, *, gain=1.0):
        super().__init__()
        self.hidden_size, self.gain = hidden_size, gain
        self.rho = nn.Parameter(torch.empty(hidden_size))
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.rho, START)

    def state_size(self):
        return LayerStateSize(self.hidden_size)

    def forward(self, x, belief=None, *, cu_seqlens=None):
        batch = self.check(x, belief, Average, cu_seqlens)
        start = x.new_zeros(batch, self.hidden_size) if belief is None else belief.average  # pyright: ignore
        bounds = None if cu_seqlens is None else cu_seqlens.tolist()
        rows = x if bounds is None else [x[0, i:j] for i, j in pairwise(bounds)]
        outputs, ends = [], []
        for row, average in zip(rows, start, strict=True):
            seen = []
            for token in row:
                average = self.rho * average + (1 - self.rho) * token
                seen.append(average)
            outputs.append(torch.stack(seen) if seen else row)
            ends.append(average)
        y = torch.stack(outputs) if bounds is None else torch.cat(outputs)[None]
        return self.gain * self.o_proj(y), Average(torch.stack(ends))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_modules", {})
    register("smoother", Smoother)


def model(**more) -> Any:
    torch.manual_seed(0)
    return MemoryForCausalLM(tiny_config(["smoother", "bayesian_layer"], **more)).eval()


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


def test_reset_parameters_gives_the_starting_values():
    assert (model().model.layers[0].mixer.rho == START).all()


def test_options_reach_the_layer():
    config = tiny_config(["smoother", "gla"], layer_options={"smoother": {"gain": 0.5}})
    mixer: Any = MemoryForCausalLM(config).model.layers[0].mixer
    assert mixer.gain == 0.5
    with pytest.raises(ValueError, match=r"^colour: expected an option of smoother \(gain\), got colour=1"):
        tiny_config(["smoother"], layer_options={"smoother": {"colour": 1}})


def test_it_trains_beside_a_built_in_layer():
    net = model().train()
    net.gradient_checkpointing_enable()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = net(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert (net.model.layers[0].mixer.rho != START).all()


def test_padding_and_generation():
    net = model()
    alone = net(IDS[:1]).logits
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), IDS[:1]), 1)
    mask = (torch.arange(11) >= 3).long()[None]
    torch.testing.assert_close(net(padded, attention_mask=mask).logits[:, 3:], alone, rtol=1e-4, atol=1e-5)
    kinds = ({"num_beams": 1}, {"num_beams": 3})
    for kind in kinds:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **kind}
        assert torch.equal(net.generate(IDS, **options), net.generate(IDS, use_cache=False, **options))


def test_it_is_saved_and_loaded(tmp_path):
    net = model()
    with torch.no_grad():
        net.model.layers[0].mixer.rho.uniform_(0.2, 0.8)
    net.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_modules"] == {"smoother": __name__}
    again: Any = MemoryForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.layers[0].mixer.rho, net.model.layers[0].mixer.rho)
    assert torch.equal(again(IDS).logits, net(IDS).logits)


def test_its_cache_is_saved_and_loaded(tmp_path):
    net = model()
    with torch.no_grad():
        cache = net(IDS[:, :5], use_cache=True).past_key_values
        cache.save(tmp_path / "cache.safetensors")
        expected = net(IDS[:, 5:], past_key_values=cache).logits
        again = MemoryCache.load(tmp_path / "cache.safetensors")
        assert torch.equal(net(IDS[:, 5:], past_key_values=again).logits, expected)


@pytest.mark.parametrize("load", [MemoryConfig.from_pretrained, MemoryForCausalLM.from_pretrained])
def test_loading_says_which_module_to_import(tmp_path, monkeypatch, load):
    model().save_pretrained(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ValueError, match=f"^layers: expected .*got 'smoother'; import {__name__} first, the module"):
        load(tmp_path)


def test_loading_what_a_script_saved(tmp_path, monkeypatch):
    model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace(f'"{__name__}"', '"__main__"'))
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ValueError, match="^layers: .*'smoother'; register it first, as the script that saved"):
        MemoryConfig.from_pretrained(tmp_path)
