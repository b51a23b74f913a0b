"""Relatives in full: loops over tokens from the equations of their papers, Transformers' xLSTM, and whole models."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import xLSTMConfig
from transformers.models.xlstm import modeling_xlstm

import membydesign as mbd
from layers.contract import WIDTH, in_pieces, shaken, tokens
from layers.test_against_papers import Weights, convolution, heads, length_one, rms_norm
from layers.test_against_transformers import TOLERANCES, meaning
from membydesign.layers import (
    MLSTM,
    Comba,
    GatedDeltaNet2,
    GatedDeltaProduct,
    MemoryLayer,
    PreconditionedDeltaNet,
    make_layer,
)
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.testing import assert_close

NAMES = ("preconditioned_deltanet", "gated_deltanet_2", "deltaproduct", "comba", "rwkv7", "mlstm")
H, D, M, T = 2, 8, 6, 40


def projected(weights: Weights, x: Tensor) -> list[Tensor]:
    """SiLU(conv(W x)) for q, k and v, [B,T,·]."""
    return [convolution(weights, f"{n}_conv1d", F.linear(x, weights[f"{n}_proj.weight"])) for n in "qkv"]


def scalar_decay(weights: Weights, x: Tensor, which: str = "") -> Tensor:
    step = F.softplus(F.linear(x, weights[f"a{which}_proj.weight"]) + weights[f"dt_bias{which}"])
    return torch.exp(-torch.exp(weights[f"A_log{which}"]) * step)


def read(weights: Weights, x: Tensor, reads: list[Tensor], gate: Tensor) -> Tensor:
    y = rms_norm(torch.stack(reads, 1), weights["o_norm.weight"]).flatten(-2)
    return F.linear(y * gate, weights["o_proj.weight"])


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def preconditioned(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (heads(y) for y in projected(weights, x))
    q, k = length_one(q) / math.sqrt(D), length_one(k)
    a, of_curvature = scalar_decay(weights, x), scalar_decay(weights, x, "_atk")
    beta, eta = (torch.sigmoid(F.linear(x, weights[f"b{n}_proj.weight"])) for n in ("", "_atk"))
    S, c, reads = x.new_zeros(len(x), H, D, v.shape[-1]), x.new_zeros(len(x), H, D), []
    for t in range(x.shape[1]):
        c = of_curvature[:, t, :, None] * c + eta[:, t, :, None] * k[:, t] ** 2
        r = torch.log(c + 1e-6) - weights["log_atk_scale"][:, None]
        scaled = torch.exp(-math.log(1.5) * r / (1 + r.abs())) * k[:, t]
        S = a[:, t, :, None, None] * S
        error = v[:, t] - (k[:, t, :, None, :] @ S)[..., 0, :]
        S = S + beta[:, t, :, None, None] * outer(scaled, error)
        reads.append((q[:, t, :, None, :] @ S)[..., 0, :])
    return read(weights, x, reads, F.silu(F.linear(x, weights["g_proj.weight"]))), S


def gated_delta_rule_2(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (heads(y) for y in projected(weights, x))
    q, k = length_one(q) / math.sqrt(D), length_one(k)
    low = F.linear(F.linear(x, weights["f_a_proj.weight"]), weights["f_b_proj.weight"])
    alpha = torch.exp(-torch.exp(weights["A_log"])[:, None] * heads(F.softplus(low + weights["dt_bias"])))
    b, w = (heads(torch.sigmoid(F.linear(x, weights[f"{n}_proj.weight"]))) for n in "bw")
    S, reads = x.new_zeros(len(x), H, D, v.shape[-1]), []
    for t in range(x.shape[1]):
        erased = torch.eye(D, dtype=x.dtype) - outer(k[:, t], b[:, t] * k[:, t])
        S = erased @ (alpha[:, t, :, :, None] * S) + outer(k[:, t], w[:, t] * v[:, t])
        reads.append((q[:, t, :, None, :] @ S)[..., 0, :])
    low = F.linear(x, weights["g_a_proj.weight"])
    gate = torch.sigmoid(F.linear(low, weights["g_b_proj.weight"], weights["g_b_proj.bias"]))
    return read(weights, x, reads, gate), S


def delta_product(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = projected(weights, x)
    n = k.shape[-1] // q.shape[-1]
    q, beta = length_one(heads(q)) / math.sqrt(D), 2 * torch.sigmoid(F.linear(x, weights["b_proj.weight"]))
    k, v, beta = ([heads(part) for part in y.chunk(n, -1)] for y in (k, v, beta))
    a = scalar_decay(weights, x)
    S, reads = x.new_zeros(len(x), H, D, v[0].shape[-1]), []
    for t in range(x.shape[1]):
        S = a[:, t, :, None, None] * S
        for j in range(n):
            key, b = length_one(k[j][:, t]), beta[j][:, t, :, :, None]
            S = (torch.eye(D, dtype=x.dtype) - b * outer(key, key)) @ S + b * outer(key, v[j][:, t])
        reads.append((q[:, t, :, None, :] @ S)[..., 0, :])
    return read(weights, x, reads, F.silu(F.linear(x, weights["g_proj.weight"]))), S


def comba(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (heads(y) for y in projected(weights, x))
    share = torch.sigmoid(weights["decay"])
    q = length_one(q - (weights["D"] * share)[:, None] * k) / math.sqrt(D)
    k, a = length_one(k), scalar_decay(weights, x)
    beta = torch.sigmoid(F.linear(x, weights["b_proj.weight"]))
    S, reads = x.new_zeros(len(x), H, D, v.shape[-1]), []
    for t in range(x.shape[1]):
        b = beta[:, t, :, None, None]
        A = a[:, t, :, None, None] * torch.eye(D, dtype=x.dtype) - share[:, None, None] * b * outer(k[:, t], k[:, t])
        S = A @ S + b * outer(k[:, t], v[:, t])
        reads.append((q[:, t, :, None, :] @ S)[..., 0, :])
    return read(weights, x, reads, torch.sigmoid(F.linear(x, weights["g_proj.weight"]))), S


CASES = {
    "preconditioned": (lambda: PreconditionedDeltaNet(WIDTH, H, D, value_dim=M), preconditioned),
    "gated_deltanet_2": (lambda: GatedDeltaNet2(WIDTH, H, D, value_dim=M), gated_delta_rule_2),
    "deltaproduct": (lambda: GatedDeltaProduct(WIDTH, H, D, value_dim=M), delta_product),
    "deltaproduct_of_three": (
        lambda: GatedDeltaProduct(WIDTH, H, D, writes_per_token=3, short_convolution=None),
        delta_product,
    ),
    "comba": (lambda: Comba(WIDTH, H, D, value_dim=M), comba),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients(name):
    make, loop = CASES[name]
    torch.manual_seed(0)
    layer = shaken(make()).double()
    x, weight = tokens(2, T).requires_grad_(), tokens(2, T, seed=3)
    weights = dict(layer.named_parameters())
    y, state = loop(weights, x)
    wanted = torch.autograd.grad((y * weight).mean(), [x, *weights.values()])
    ours, belief = layer(x)
    found = torch.autograd.grad((ours * weight).mean(), [x, *layer.parameters()])
    assert_close(ours, y, 1e-9, "outputs")
    assert_close(belief.memory.mean, state, 1e-9, "state")
    for which, a, b in zip(("x", *weights), found, wanted, strict=True):
        scale = b.abs().max()
        assert scale > 0
        assert_close(a / scale, b / scale, 1e-9, which)
    stepped, _ = in_pieces(layer, x, [0, 30, *range(31, T + 1)])
    assert_close(stepped, y, 1e-9, "outputs token by token")


native_mlstm = pytest.mark.skipif(
    not hasattr(modeling_xlstm, "mlstm_recurrent_sequence_native"),
    reason="the package xlstm is installed, so Transformers does not define its own mLSTM",
)


@native_mlstm
@pytest.mark.parametrize("form", ["recurrent_sequence_native", "chunkwise_native_autograd"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_recurrence_is_that_of_transformers(dtype, form):
    """Outputs and the whole state (C, n, m), with gates far apart."""
    generator = torch.Generator().manual_seed(0)
    B, T = 2, 128
    q, k = torch.randn(2, B, T, H, D, generator=generator, dtype=dtype).unbind()
    v = torch.randn(B, T, H, M, generator=generator, dtype=dtype)
    gates = 4 * torch.randn(2, B, T, H, generator=generator, dtype=dtype)
    first = [y.transpose(1, 2) for y in (q, k, v, *gates)]
    named = dict(zip(("query", "key", "value", "igate", "fgate"), first, strict=True))
    options = {"chunk_size": 64} if form.startswith("chunk") else {"dtype_state": dtype}
    with meaning(dtype):
        wanted, (C, n, m) = getattr(modeling_xlstm, f"mlstm_{form}")(**named, return_last_states=True, **options)
    out = mbd.filter_sequence(
        mbd.catalogue["mlstm"], q / math.sqrt(D), k, v, log_input=gates[0], log_decay=F.logsigmoid(gates[1])
    )
    assert_close(out.output, wanted.transpose(1, 2), TOLERANCES[dtype])
    unit = (out.belief.log_scale - m.squeeze(-1)).exp()[..., None]  # a chunk's m may differ from a token's
    assert_close(out.belief.keys * unit, n.view_as(out.belief.keys), TOLERANCES[dtype])
    assert_close(out.belief.values * unit[..., None], C, TOLERANCES[dtype])


@native_mlstm
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_mlstm_layer_is_that_of_transformers(dtype):
    """Outputs and gradients of xLSTMLayer, with its weights by their own names."""
    config = xLSTMConfig(
        hidden_size=WIDTH, num_heads=2, qk_dim_factor=0.5, v_dim_factor=1.0, weight_mode="single", num_hidden_layers=1
    )
    config.autocast_kernel_dtype = config.inference_state_dtype = "float32"
    with meaning(dtype):  # which they look up while they are made
        theirs = modeling_xlstm.xLSTMLayer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    theirs = theirs.to(dtype)
    ours = MLSTM(WIDTH, 2, 6).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, weight = tokens(2, 70, dtype=dtype).requires_grad_(), tokens(2, 70, dtype=dtype, seed=9)
    with meaning(dtype):
        wanted, _ = theirs.train()(x)
    y, _ = ours(x)
    assert_close(y, wanted, TOLERANCES[dtype])
    inputs = [x, *theirs.parameters()], [x, *(dict(ours.named_parameters())[n] for n, _ in theirs.named_parameters())]
    of_theirs, of_ours = (
        torch.autograd.grad((z * weight).mean(), own) for z, own in zip((wanted, y), inputs, strict=True)
    )
    for a, b in zip(of_ours, of_theirs, strict=True):
        assert_close(a / b.abs().max(), b / b.abs().max(), TOLERANCES[dtype])


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_style" for name in NAMES)])
def test_a_model_learns_and_generates_with_a_cache(name):
    """A few steps on one text lower its loss; greedy generation with a cache is what whole passes give."""
    torch.manual_seed(0)
    model = MemoryForCausalLM(
        MemoryConfig(layers=[name], hidden_size=16, num_hidden_layers=1, num_heads=2, head_dim=8, vocab_size=11)
    )
    ids = torch.randint(0, 11, (2, 12))
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    losses = []
    for _ in range(12):
        loss = model.forward(input_ids=ids, labels=ids).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.eval()
    cached: Any = model.generate(ids[:, :5], max_new_tokens=6, do_sample=False, use_cache=True)  # pyright: ignore
    whole = ids[:, :5]
    for _ in range(6):
        logits = model.forward(input_ids=whole).logits
        assert logits is not None
        whole = torch.cat((whole, logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("name", [f"{name}_style" for name in NAMES])
def test_on_the_scaffold_memory_stays_bounded(name):
    """Keys and removals that a layer maps from its input are brought to length one, so that no memory explodes."""
    torch.manual_seed(0)
    layer = make_layer(name, WIDTH, 2, 8)
    assert isinstance(layer, MemoryLayer)
    with torch.no_grad():
        for name, parameter in layer.noises.named_parameters():
            if name.endswith("weight"):
                parameter.normal_()
        _, belief = layer(tokens(1, 2000, dtype=torch.float32))
    assert belief.memory[0].abs().max() < 100
