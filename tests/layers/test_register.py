"""Layers of a user's own, by name."""

from functools import partial

import pytest
import torch

import membydesign as mbd
from layers.contract import WIDTH, tokens
from membydesign.layers import LAYERS, DeltaNet, MemoryLayer, layer_names, make_layer, register, registry


@pytest.fixture(autouse=True)
def _only_built_in_layers_afterwards(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_modules", {})


def narrow(hidden_size, num_heads, head_dim, *, shrink=2):
    return DeltaNet(hidden_size, num_heads, head_dim // shrink)


DESIGN = mbd.catalogue["bayesian_layer"].replace(covariance=mbd.Dense(prior=3.0))


@pytest.mark.parametrize("name", ["", 3, None, "bayesian_layer", "gla", "gla_style", "attention"])
def test_bad_names(name):
    with pytest.raises(ValueError, match=f"^name: expected one that no built-in layer has, got {name!r}"):
        register(name, DESIGN)
    assert layer_names() == LAYERS


@pytest.mark.parametrize("layer", [3, None, "gla"])
def test_bad_layers(layer):
    with pytest.raises(ValueError, match=f"^layer: expected a Design, or a function .* got {layer!r}"):
        register("mine", layer)
    assert layer_names() == LAYERS


def test_names_come_after_the_built_in_ones():
    assert layer_names() == LAYERS
    register("one", DESIGN)
    register("another", narrow)
    assert layer_names() == (*LAYERS, "one", "another")
    with pytest.raises(
        ValueError, match="^layer: expected one of bayesian_layer, .*, one, another, got 'nother'.*another"
    ):
        make_layer("nother", WIDTH, 2, 8)


def test_a_design_becomes_a_memory_layer():
    register("mine", DESIGN)
    torch.manual_seed(0)
    layer = make_layer("mine", WIDTH, 2, 8, groups=2, write_noise={"learned": 0.3}, short_convolution=3)
    assert isinstance(layer, MemoryLayer)
    assert layer.design == DESIGN.replace(write=DESIGN.write.with_groups(2))
    torch.manual_seed(0)
    same = MemoryLayer(layer.design, WIDTH, 2, 8, write_noise=mbd.Learned(0.3), short_convolution=3)
    x = tokens(2, 5, dtype=torch.float32)
    assert torch.equal(layer(x)[0], same(x)[0])


def test_a_factory():
    register("mine", narrow)
    assert make_layer("mine", WIDTH, 2, 8).key_dim == 4
    assert make_layer("mine", WIDTH, 2, 8, shrink=4).key_dim == 2
    with pytest.raises(ValueError, match=r"^colour: expected an option of mine \(shrink\), got colour=1$"):
        make_layer("mine", WIDTH, 2, 8, colour=1)


def test_a_factory_may_take_any_option():
    register("mine", lambda *sizes, **options: DeltaNet(*sizes, **options))
    assert make_layer("mine", WIDTH, 2, 8, value_dim=5).value_dim == 5


def test_a_factory_must_return_a_layer():
    register("mine", lambda hidden_size, num_heads, head_dim: torch.nn.Linear(hidden_size, head_dim))  # pyright: ignore
    with pytest.raises(ValueError, match="^layer: expected a SequenceLayer from what 'mine' names, got Linear$"):
        make_layer("mine", WIDTH, 2, 8)


def test_a_name_may_be_registered_again():
    register("mine", narrow)
    register("mine", DESIGN)
    assert layer_names() == (*LAYERS, "mine")
    assert isinstance(make_layer("mine", WIDTH, 2, 8), MemoryLayer)


@pytest.mark.parametrize(
    "layer", [DESIGN, narrow, partial(narrow, shrink=4), partial(DeltaNet, short_convolution=None)]
)
def test_the_module_to_import(layer):
    """That of the layer; of a composition of built-in parts, the one that registers it."""
    register("mine", layer)
    assert registry.module_of("mine") == __name__
    assert registry.module_of("deltanet") is None
