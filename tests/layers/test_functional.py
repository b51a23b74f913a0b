"""Layers under torch.func, create_graph and torch.compile, and how a layer's filter is computed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from layers.contract import WIDTH, shaken, tokens
from membydesign.layers import LAYERS, make_layer
from membydesign.models import MemoryConfig, MemoryForCausalLM

FILTERED = [name for name in LAYERS if name not in ("attention", "hyena")]


def layer_of(name: str, **options) -> Any:
    torch.manual_seed(0)
    return shaken(make_layer(name, WIDTH, 2, 4, **options)).double()


def loss_of(layer, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(layer, parameters, (x,))[0].square().sum()


@pytest.mark.parametrize("options", [{}, {"backend": "torch"}, {"method": "recurrent"}], ids=str)
@pytest.mark.parametrize("name", FILTERED)
def test_gradients_of_each_sample(name, options):
    """vmap(grad(loss)) gives what one backward after another gives, for every layer and with its default backend."""
    layer, x = layer_of(name, **options), tokens(3, 9)
    parameters = {key: p.detach() for key, p in layer.named_parameters()}
    found = vmap(grad(lambda p, x: loss_of(layer, p, x[None])), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        expected = torch.autograd.grad(layer(x[i : i + 1])[0].square().sum(), list(layer.parameters()))
        for key, one in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[key][i], one, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", FILTERED)
def test_directional_derivatives(name):
    layer, x, direction = layer_of(name), tokens(2, 7), tokens(2, 7, seed=4)
    parameters = {key: p.detach() for key, p in layer.named_parameters()}
    tangent = jvp(lambda x: loss_of(layer, parameters, x), (x,), (direction,))[1]
    expected = (grad(lambda x: loss_of(layer, parameters, x))(x) * direction).sum()
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("way", [{"backend": "torch"}, {"method": "recurrent"}], ids=str)
@pytest.mark.parametrize("name", ["bayesian_layer", "bayesian_layer_diagonal", "gated_deltanet", "mamba2", "rwkv7"])
def test_second_derivatives_against_differences(name, way):
    layer, x = layer_of(name, **way), tokens(1, 3)
    direction = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def along(s: Tensor) -> Tensor:
        return layer(x + s * direction)[0].square().sum()

    start = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(along, (start,), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["bayesian_layer", "gated_deltanet", "rwkv7"])
def test_the_error_says_what_works(name):
    """Native code refuses a second derivative, and does what the error recommends: the attribute may be set later."""
    layer, x = layer_of(name), tokens(1, 5).requires_grad_()
    for backend in ("auto", "torch"):
        layer.backend = backend
        (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        if backend == "auto":
            with pytest.raises(RuntimeError, match=r'use backend="torch" \(an argument of .* layers\)'):
                torch.autograd.grad(gradient.sum(), x)
        else:
            assert torch.autograd.grad(gradient.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", FILTERED)
def test_method_and_backend_are_options(name):
    layer = layer_of(name, method="recurrent", backend="torch")
    assert "method='recurrent', backend='torch'" in layer.extra_repr()
    assert "backend" not in layer_of(name).extra_repr()
    torch.testing.assert_close(layer(tokens(2, 9))[0], layer_of(name)(tokens(2, 9))[0])
    with pytest.raises(ValueError, match='^backend: expected "auto", "torch".* got \'gpu\''):
        layer_of(name, backend="gpu")
    with pytest.raises(ValueError, match='^method: expected "chunk" or "recurrent", got \'scan\''):
        layer_of(name, method="scan")


def test_a_model_hands_them_to_its_layers(tmp_path):
    options = {"gla": {"backend": "torch"}, "rwkv7": {"method": "recurrent"}}
    config = MemoryConfig(vocab_size=8, hidden_size=WIDTH, layers=["gla", "rwkv7"], num_heads=2, layer_options=options)
    config.save_pretrained(tmp_path)
    gla, rwkv7 = MemoryForCausalLM(MemoryConfig.from_pretrained(tmp_path)).model.mixers()
    assert (gla.backend, rwkv7.method) == ("torch", "recurrent")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bayesian_layer", "gated_deltanet", "rwkv7"])
def test_a_layer_compiles_whole(name):
    torch.compiler.reset()
    layer, x = layer_of(name), tokens(1, 6)
    expected, belief = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x[:, :1], belief.detach())[0], layer(x[:, :1], belief.detach())[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is:DeprecationWarning")  # torch's, in its compiler
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")  # likewise
@pytest.mark.parametrize("name", ["bayesian_layer", "rwkv7"])
def test_gradients_of_each_sample_compile(name):
    """The operators that stand for native code in a graph have no rules for torch.func, so torch's form takes over."""
    torch.manual_seed(0)
    layer = make_layer(name, 16, 2, 8)
    x = torch.randn(3, 4, 6, 16)

    def loss(x):
        return layer(x)[0].square().mean()

    per_sample = vmap(grad(loss))
    compiled = torch.compile(per_sample)
    torch.testing.assert_close(compiled(x), per_sample(x), rtol=1e-4, atol=1e-5)
