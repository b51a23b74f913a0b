"""A name means one network, whoever makes it, and a printed layer says what it is."""

import pytest
import torch

import membydesign as mbd
from layers.contract import WIDTH, tokens
from membydesign.layers import LAYERS, MemoryLayer, make_layer


def made(make, name, **options):
    torch.manual_seed(0)
    return make(name, WIDTH, 2, 8, **options)


@pytest.mark.parametrize("options", [{}, {"value_dim": 6, "short_convolution": 3, "write_noise": 0.3}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_name_is_one_network(name, options):
    if not isinstance(made(make_layer, name), MemoryLayer):
        with pytest.raises(ValueError, match="^design: expected "):
            made(MemoryLayer, name)
        return
    needs = {parameter.name for parameter in made(MemoryLayer, name).design.step_parameters}
    options = {option: value for option, value in options.items() if option != "write_noise" or option in needs}
    layer, other = made(MemoryLayer, name, **options), made(make_layer, name, **options)
    weights, others = layer.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    assert str(layer) == str(other)
    x = tokens(2, 9, dtype=torch.float32)
    y, belief = layer(x)
    z, same = other(x)
    assert torch.equal(y, z)
    assert all(
        torch.equal(part, other_part) for (_, part), (_, other_part) in zip(belief.parts(), same.parts(), strict=True)
    )


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba2"])
def test_the_name_of_an_architecture_is_no_name_of_its_update(name):
    say = rf"make_layer\('{name}', \.\.\.\) makes that; .* say '{name}_style' or pass catalogue\['{name}'\]"
    with pytest.raises(
        ValueError, match=rf"^design: expected .* got '{name}', the name of a whole architecture: {say}"
    ):
        MemoryLayer(name, WIDTH, 2, 8)
    style, design = made(MemoryLayer, f"{name}_style"), made(MemoryLayer, mbd.catalogue[name])
    assert str(style) == str(design)


@pytest.mark.parametrize("name", ["attention", "gated", 3])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=f"^design: expected a Design or one of bayesian_layer, .* got {name!r}"):
        MemoryLayer(name, WIDTH, 2, 8)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_shows_what_it_is(name):
    layer = made(make_layer, name)
    shown = str(layer)
    assert shown.startswith(f"{type(layer).__name__}(")
    assert f"hidden_size={WIDTH}" in shown
    design = getattr(layer, "design", None)
    if design is not None:
        assert f"design={design.title!r}: {design.summary()}" in shown
        assert f"num_heads=2, D=8, M={layer.value_dim}" in shown
    if isinstance(layer, MemoryLayer):
        for noise, variance in layer.noises.items():
            assert f"{noise}={variance.source}" in layer.extra_repr()


def test_all_names_print_differently():
    """Also the ablation whose update is KDA's: it has its own title and its own noises."""
    assert len({str(made(make_layer, name)) for name in LAYERS}) == len(LAYERS)
