"""What a layer says about a mask, bad weights and bad input, which the filter inside it knows nothing of."""

import pytest
import torch

from layers.contract import WIDTH, tokens
from membydesign.errors import NonFiniteError
from membydesign.layers import LAYERS, make_layer

CHECKED = [name for name in LAYERS if name not in ("attention", "hyena")]


@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_is_sent_to_packing(name):
    layer = make_layer(name, WIDTH, 2, 8)
    with pytest.raises(TypeError, match=r"^attention_mask: expected cu_seqlens instead, .* MemoryModel"):
        layer(tokens(2, 3, dtype=torch.float32), attention_mask=torch.ones(2, 3))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", CHECKED)
def test_bad_weights_are_not_blamed_on_the_input(name, resumed):
    layer = make_layer(name, WIDTH, 2, 8)
    x = tokens(2, 3, dtype=torch.float32)
    _, belief = layer(x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter[..., -1:] = float("nan")
    with pytest.raises(NonFiniteError, match=r": the weight \S+ holds NaN or infinity .*Training diverged") as e:
        layer(x[:, :1], belief.detach()) if resumed else layer(x)
    assert str(e.value).startswith(f"{type(layer).__name__}: ")
    assert "float16" not in str(e.value)


@pytest.mark.parametrize("name", CHECKED)
def test_bad_input_is_called_by_its_name(name):
    layer, x = make_layer(name, WIDTH, 2, 8), tokens(2, 3, dtype=torch.float32)
    x[1, 2, 5] = float("inf")
    with pytest.raises(ValueError, match=r"^x: expected finite values, got inf at index \[1, 2, 5\]"):
        layer(x)


@pytest.mark.parametrize("name", ["bayesian_layer", "gated_deltanet", "rwkv7"])
def test_a_step_of_adam_in_float16(name):
    """Its eps underflows there, 0/0 is NaN, and the next call says so."""
    torch.manual_seed(0)
    layer = make_layer(name, WIDTH, 2, 8).half()
    x = torch.zeros(2, 3, WIDTH, dtype=torch.float16)
    x[..., 0] = 1.0
    optimiser = torch.optim.Adam(layer.parameters())
    layer(x)[0].square().mean().backward()
    optimiser.step()
    assert any(p.isnan().any() for p in layer.parameters())
    with pytest.raises(
        NonFiniteError, match=r": the weight \S+ holds NaN .*Adam makes float16 weights NaN.*torch.autocast"
    ):
        layer(x)


def test_maps_that_overflow_in_float16():
    layer = make_layer("bayesian_layer", WIDTH, 2, 8).half()
    with torch.no_grad():
        layer.get_parameter("v_proj.weight").fill_(1e3)
    with pytest.raises(ValueError, match=r"^v: expected finite values, got inf .*: .* maps overflowed in float16"):
        layer(torch.full((1, 3, WIDTH), 1e3, dtype=torch.float16))


def test_other_errors_stay_what_they_are():
    layer = make_layer("bayesian_layer", WIDTH, 2, 8)
    _, belief = layer(tokens(1, 3, dtype=torch.float32))
    spoiled = belief.map(lambda part: part * float("nan"))
    with pytest.raises(ValueError, match=r"^initial\.mean: expected finite values"):
        layer(tokens(1, 3, dtype=torch.float32), spoiled)
    with torch.device("meta"):
        nowhere = make_layer("bayesian_layer", WIDTH, 2, 8)
        with pytest.raises(ValueError, match=r"^initial\.mean: expected shape"):
            nowhere(torch.empty(1, 3, WIDTH), belief.to("meta").map(lambda part: part[:, :1]))
