"""Weights copied into Transformers' own modules and into ours give the same outputs, states and gradients.

Their code casts to float32 inside. For the comparison in float64 it runs unchanged, but with its two ways to say
float32, `torch.float32` and `Tensor.float`, meaning float64.
"""

from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, KimiLinearConfig, Mamba2Config, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from layers.contract import WIDTH, tokens
from membydesign.layers import KDA, GatedDeltaNet, Mamba2
from membydesign.layers.filtered import FilterLayer
from membydesign.testing import assert_close

Named = dict[str, torch.Tensor]
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
T = 150  # more than two chunks of theirs, and no multiple of one


class Case(NamedTuple):
    """Their module and ours, and how to see theirs as ours."""

    config: Any
    theirs: type[torch.nn.Module]
    ours: Callable[[], FilterLayer]
    renamed: Callable[[Named], Named]
    state: Callable[[torch.Tensor], torch.Tensor] = lambda state: state


def qwen(key_heads: int) -> Case:
    H, D, M = 4, 8, 6
    shared = H // key_heads

    def renamed(theirs: Named) -> Named:
        """Queries, keys, values and gates lie together, one head of keys after the other."""
        together = theirs["in_proj_qkvz.weight"].unflatten(0, (key_heads, -1))
        q, k, v, g = (x.flatten(0, 1) for x in together.split([D, D, shared * M, shared * M], 1))
        b, a = (x.flatten(0, 1) for x in theirs["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).chunk(2, 1))
        convolutions = theirs["conv1d.weight"].split([key_heads * D, key_heads * D, H * M])
        return {
            **{f"{name}_proj.weight": x for name, x in zip("qkvgab", (q, k, v, g, a, b), strict=True)},
            **{f"{name}_conv1d.weight": x for name, x in zip("qkv", convolutions, strict=True)},
            "A_log": theirs["A_log"],
            "dt_bias": theirs["dt_bias"],
            "o_norm.weight": theirs["norm.weight"],
            "o_proj.weight": theirs["out_proj.weight"],
        }

    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_value_heads=H,
        linear_num_key_heads=key_heads,
        linear_key_head_dim=D,
        linear_value_head_dim=M,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )
    return Case(
        config,
        Qwen3NextGatedDeltaNet,
        lambda: GatedDeltaNet(WIDTH, H, D, value_dim=M, num_key_heads=key_heads),
        renamed,
    )


def kimi() -> Case:
    H, D = 3, 8

    def renamed(theirs: Named) -> Named:
        names = {name.removeprefix("forget_gate."): x for name, x in theirs.items() if name != "conv1d.weight"}
        convolutions = theirs["conv1d.weight"].chunk(3)
        return {
            **names,
            **{f"{name}_conv1d.weight": x for name, x in zip("qkv", convolutions, strict=True)},
            "A_log": names["A_log"].flatten(),
        }

    config = KimiLinearConfig(
        hidden_size=WIDTH,
        linear_num_heads=H,
        linear_head_dim=D,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        rms_norm_eps=1e-5,
    )
    return Case(config, KimiLinearDeltaAttention, lambda: KDA(WIDTH, H, D), renamed)


def mamba2(groups: int = 1, width: int = 4) -> Case:
    H, D = 4, 8
    config = Mamba2Config(
        hidden_size=WIDTH,
        num_heads=H,
        head_dim=2 * WIDTH // H,
        state_size=D,
        n_groups=groups,
        conv_kernel=width,
        expand=2,
        chunk_size=64,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-5,
    )
    return Case(
        config,
        Mamba2Mixer,
        lambda: Mamba2(WIDTH, H, D, num_key_heads=groups, short_convolution=width),
        renamed=lambda theirs: theirs,
        state=lambda state: state.mT,  # theirs has columns of values first
    )


CASES = {
    "qwen3_next": qwen(4),
    "qwen3_next_shared_keys": qwen(2),
    "kimi_linear": kimi(),
    "mamba2": mamba2(),
    "mamba2_groups": mamba2(groups=2),
    "mamba2_convolution_of_one": mamba2(width=1),
}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@contextmanager
def meaning(dtype: torch.dtype):
    """While their code runs, float32 means dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", dtype)
        patch.setattr(torch.Tensor, "float", lambda x: x.to(dtype))
        yield


def pair(case: Case, dtype: torch.dtype) -> tuple[torch.nn.Module, FilterLayer]:
    """Their module with weights off their starting values, and ours with the same weights."""
    torch.manual_seed(0)
    ours = case.ours()
    theirs = case.theirs(case.config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            start = 0.0 if name.endswith(("A_log", "dt_bias")) else parameter
            parameter.copy_(start + 0.2 * torch.randn(parameter.shape, generator=generator))
    theirs, ours = theirs.to(dtype).eval(), ours.to(dtype)
    ours.load_state_dict(case.renamed({name: p.detach() for name, p in theirs.named_parameters()}), strict=True)
    return theirs, ours


def test_outputs_and_gradients(case, dtype):
    theirs, ours = pair(case, dtype)
    x = tokens(2, T, dtype=dtype).requires_grad_()
    weight = tokens(2, T, dtype=dtype, seed=9)
    with meaning(dtype):
        reference = theirs(x)
    (reference * weight).mean().backward()
    wanted = case.renamed({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    assert x.grad is not None
    wanted["x"] = x.grad
    x.grad = None
    y, _ = ours(x)
    (y * weight).mean().backward()
    assert_close(y, reference, TOLERANCES[dtype])
    found = {"x": x.grad, **{name: p.grad for name, p in ours.named_parameters()}}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        scale = wanted[name].abs().max()
        assert scale > 0
        assert_close(gradient / scale, wanted[name] / scale, TOLERANCES[dtype], name)


@torch.no_grad()
def test_states_and_decoding(case, dtype):
    """A prompt, more of it, and single tokens: after each the same output, memory and tails."""
    theirs, ours = pair(case, dtype)
    cache, belief = DynamicCache(config=case.config), None
    x = tokens(2, T + 13, dtype=dtype)
    bounds = (0, T, T + 10, T + 11, T + 12, T + 13)
    for start, end in pairwise(bounds):
        with meaning(dtype):
            reference = theirs(x[:, start:end], cache_params=cache)
        y, belief = ours(x[:, start:end], belief)
        assert_close(y, reference, TOLERANCES[dtype], f"output from {start}")
        kept: Any = cache.layers[0]
        state, inputs = kept.recurrent_states[0], kept.conv_states[0]
        assert state is not None
        assert inputs is not None
        assert_close(belief.memory.mean, case.state(state), TOLERANCES[dtype], f"memory at {end}")
        tails = torch.cat(belief.tails, -1).mT
        assert_close(tails, inputs[..., 1:], TOLERANCES[dtype], f"tails at {end}")
