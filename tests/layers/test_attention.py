"""Softmax attention: the contract, and Llama's attention with the same weights."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from layers.contract import WIDTH, LayerContract, bounds, shaken, tokens
from membydesign.layers import SoftmaxAttention, make_layer
from membydesign.testing import assert_close


class TestAttention(LayerContract):
    def make(self):
        return SoftmaxAttention(WIDTH, 4, 6)


class TestFewerKeyHeads(LayerContract):
    def make(self):
        return make_layer("attention", WIDTH, 4, 6, num_key_heads=2, rope_theta=100.0)


class TestWithoutPositions(LayerContract):
    def make(self):
        return SoftmaxAttention(WIDTH, 2, 5, rope_theta=None)


def llama(layer: SoftmaxAttention) -> tuple[LlamaAttention, Any]:
    """Llama's attention with our weights; in float64 by torch's function, since its own softmax is always float32."""
    dtype = layer.q_proj.weight.dtype
    options: dict[str, Any] = {"attn_implementation": "sdpa" if dtype == torch.float64 else "eager"}
    config = LlamaConfig(
        hidden_size=layer.hidden_size,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_key_heads,
        head_dim=layer.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": layer.rope_theta or 0.0},
        **options,
    )
    theirs = LlamaAttention(config, layer_idx=0).to(dtype)
    theirs.load_state_dict(layer.state_dict())
    return theirs, config


def embeddings(config: Any, x: torch.Tensor, start: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's own cosines and sines; beyond the float32 in which it computes them, the same formula in float64."""
    position = torch.arange(start, start + T)[None]
    if x.dtype == torch.float32:
        cos, sin = LlamaRotaryEmbedding(config)(x, position)
        return cos, sin
    theta, D = config.rope_parameters["rope_theta"], config.head_dim
    angle = position.double()[..., None] / theta ** (torch.arange(0, D, 2).double() / D)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def assert_same_cache(belief, cache: Any, tolerance: float):
    assert_close(belief.keys.transpose(1, 2), cache.layers[0].keys, tolerance)
    assert_close(belief.values.transpose(1, 2), cache.layers[0].values, tolerance)


def causal(T: int, S: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((T, S), float("-inf"), dtype=dtype).triu(S - T + 1)[None, None]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_llama(key_heads, dtype, tolerance):
    """Outputs, all gradients and the cache, whole and continued."""
    ours = shaken(SoftmaxAttention(WIDTH, 4, 8, num_key_heads=key_heads)).to(dtype)
    assert isinstance(ours, SoftmaxAttention)
    theirs, config = llama(ours)
    x = tokens(2, 60, dtype=dtype).requires_grad_()
    weight = tokens(2, 60, dtype=dtype, seed=3)
    y, belief = ours(x)
    cache = DynamicCache()
    wanted, _ = theirs(x, embeddings(config, x, 0, 60), causal(60, 60, dtype), cache)
    assert_close(y, wanted, tolerance)
    assert_same_cache(belief, cache, tolerance)
    found = torch.autograd.grad((y * weight).sum(), [x, *ours.parameters()])
    reference = torch.autograd.grad((wanted * weight).sum(), [x, *theirs.parameters()])
    for a, b in zip(found, reference, strict=True):
        assert_close(a, b, tolerance)
    start = 60
    for T in (7, 1, 1):
        more = tokens(2, T, dtype=dtype, seed=T)
        z, belief = ours(more, belief)
        wanted, _ = theirs(more, embeddings(config, more, start, T), causal(T, start + T, dtype), cache)
        start += T
        assert_close(z, wanted, tolerance)
    assert_same_cache(belief, cache, tolerance)


def test_empty_places_leave_no_trace_in_gradients():
    layer = shaken(SoftmaxAttention(WIDTH, 2, 6)).double()
    pieces = [tokens(1, n, seed=n) for n in (3, 11, 1)]
    x = torch.cat(pieces, 1).requires_grad_()
    y, _ = layer(x, cu_seqlens=bounds(pieces))
    found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    separate = torch.cat([layer(p)[0] for p in x.split([3, 11, 1], 1)], 1)
    for a, b in zip(found, torch.autograd.grad(separate.square().sum(), [x, *layer.parameters()]), strict=True):
        assert torch.isfinite(a).all()
        assert_close(a, b, 1e-9)


def test_rows_of_different_lengths_go_on_as_a_batch():
    """After a packed prefill, sequences of different lengths are decoded side by side."""
    layer = shaken(SoftmaxAttention(WIDTH, 2, 6)).double()
    pieces = [tokens(1, n, seed=n) for n in (4, 9)]
    _, belief = layer(torch.cat(pieces, 1), cu_seqlens=bounds(pieces))
    assert belief.lengths.tolist() == [4, 9]
    after = tokens(2, 3)
    y, belief = layer(after, belief)
    z, belief = layer(after[:, :1], belief)
    for i, piece in enumerate(pieces):
        _, own = layer(piece)
        wanted, own = layer(after[i : i + 1], own)
        assert_close(y[i : i + 1], wanted, 1e-9)
        assert_close(z[i : i + 1], layer(after[i : i + 1, :1], own)[0], 1e-9)


def test_even_rows_need_no_mask():
    layer = SoftmaxAttention(WIDTH, 2, 6)
    pieces = [tokens(1, 5, dtype=torch.float32, seed=n) for n in (1, 2)]
    _, belief = layer(torch.cat(pieces, 1), cu_seqlens=bounds(pieces))
    assert belief.lengths is None


def test_keys_are_kept_in_the_type_of_the_input():
    layer = SoftmaxAttention(WIDTH, 2, 6).bfloat16()
    _, belief = layer(tokens(1, 4).bfloat16())
    assert belief.keys.dtype == belief.values.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((WIDTH, 2, 5), {}, "^head_dim: expected an even number, since rotary .*, got 5$"),
        ((WIDTH, 4, 6), {"num_key_heads": 3}, "^num_key_heads: expected a divisor of num_heads = 4, got 3$"),
        ((WIDTH, 4, 6), {"num_key_heads": 0}, "^num_key_heads: expected a whole number of at least 1, got 0$"),
        ((WIDTH, 4, 6), {"rope_theta": -1.0}, "^rope_theta: expected a number above 0, .* got -1.0$"),
        ((0, 4, 6), {}, "^hidden_size: expected a whole number"),
    ],
)
def test_bad_options_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(*arguments, **options)


def test_beliefs_of_other_layers_are_refused():
    _, belief = SoftmaxAttention(WIDTH, 2, 6)(tokens(1, 3, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"^belief.keys: expected shape \[1, 3, 4, 6\] for this layer, got \[1, 3, 2"):
        SoftmaxAttention(WIDTH, 4, 6)(tokens(1, 1, dtype=torch.float32), belief)


def test_meta_device():
    with torch.device("meta"):
        SoftmaxAttention(WIDTH, 2, 6).reset_parameters()
