"""Layers against loops over tokens, written from the equations of the papers: outputs, states, gradients, in float64.

The loops take weights by name and know nothing else of a layer. Convolutions are torch's own.
"""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layers.contract import WIDTH, in_pieces, shaken, tokens
from membydesign.layers import GLA, DeltaNet, GatedDeltaNet, LinearAttention, Longhorn, RetNet
from membydesign.layers.filtered import FilterLayer
from membydesign.testing import assert_close

Weights = Mapping[str, Tensor]
Loop = Callable[[Weights, Tensor], tuple[Tensor, Tensor]]
H, D, M = 2, 8, 6
T = 70


def heads(x: Tensor, n: int = H) -> Tensor:
    return x.unflatten(-1, (n, -1))


def convolution(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Causal, each channel by itself, then SiLU; SiLU alone where there are no weights."""
    if f"{name}.weight" not in weights:
        return F.silu(x)
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    padded = F.pad(x.mT, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=len(weight)).mT)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def length_one(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_rule(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """DeltaNet and Gated DeltaNet: S ← α S (I − β k kᵀ) + β v kᵀ, here transposed."""
    q, k, v = (heads(convolution(weights, f"{n}_conv1d", F.linear(x, weights[f"{n}_proj.weight"]))) for n in "qkv")
    q, k = length_one(q) / math.sqrt(D), length_one(k)
    beta = torch.sigmoid(F.linear(x, weights["b_proj.weight"]))
    alpha = torch.ones_like(beta)
    if "A_log" in weights:
        step = torch.log1p(torch.exp(F.linear(x, weights["a_proj.weight"]) + weights["dt_bias"]))
        alpha = torch.exp(-torch.exp(weights["A_log"]) * step)
    S, reads = x.new_zeros(len(x), H, D, v.shape[-1]), []
    for t in range(x.shape[1]):
        a, b = alpha[:, t, :, None, None], beta[:, t, :, None, None]
        kk = k[:, t, :, :, None] * k[:, t, :, None, :]
        S = a * (torch.eye(D, dtype=x.dtype) - b * kk) @ S + b * k[:, t, :, :, None] * v[:, t, :, None, :]
        reads.append((q[:, t, :, None, :] @ S)[..., 0, :])
    y = rms_norm(torch.stack(reads, 1), weights["o_norm.weight"]).flatten(-2)
    if "g_proj.weight" in weights:
        y = y * F.silu(F.linear(x, weights["g_proj.weight"]))
    return F.linear(y, weights["o_proj.weight"]), S


def longhorn(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """S ← argmin ‖S − S₋₁‖² + ‖S k − x′‖²_diag(β), by its normal equations, channel by channel."""
    u, z = F.linear(x, weights["in_proj.weight"]).chunk(2, -1)
    u = convolution(weights, "conv1d", u)
    low, k, q = F.linear(u, weights["x_proj.weight"]).split([math.ceil(WIDTH / 16), D, D], -1)
    beta = torch.sigmoid(F.linear(low, weights["dt_head.weight"], weights["dt_head.bias"]))
    S, reads = x.new_zeros(len(x), u.shape[-1], D), []
    for t in range(x.shape[1]):
        kk = k[:, t, :, None] * k[:, t, None, :]
        normal = torch.eye(D, dtype=x.dtype) + beta[:, t, :, None, None] * kk[:, None]
        target = S + (beta * u)[:, t, :, None] * k[:, t, None, :]
        S = torch.linalg.solve(normal, target[..., None])[..., 0]
        reads.append((S @ q[:, t, :, None])[..., 0])
    y = (torch.stack(reads, 1) + weights["D"] * u) * F.silu(z)
    return F.linear(y, weights["out_proj.weight"]), S.unflatten(1, (H, -1)).mT


def linear_attention(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """V′ᵢ = φ(Qᵢ)ᵀ Σⱼ φ(Kⱼ) Vⱼᵀ / (φ(Qᵢ)ᵀ Σⱼ φ(Kⱼ))."""
    q, k, v = (heads(F.linear(x, weights[f"{n}_proj.weight"])) for n in "qkv")
    q, k = F.elu(q) + 1, F.elu(k) + 1
    s, z, reads = x.new_zeros(len(x), H, D, M), x.new_zeros(len(x), H, D), []
    for t in range(x.shape[1]):
        s = s + k[:, t, :, :, None] * v[:, t, :, None, :]
        z = z + k[:, t]
        above = (q[:, t, :, :, None] * s).sum(-2)
        reads.append(above / ((q[:, t] * z).sum(-1, keepdim=True) + 1e-6))
    return F.linear(torch.stack(reads, 1).flatten(-2), weights["o_proj.weight"]), torch.cat((s, z[..., None]), -1)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: the pair (x₂ᵢ, x₂ᵢ₊₁) as a complex number, times e^{i n θᵢ}; x is [B,T,H,D]."""
    theta = 10000 ** -torch.linspace(0, 1, D // 2, dtype=x.dtype)
    pairs = torch.view_as_complex(x.unflatten(-1, (D // 2, 2)))
    phase = torch.polar(torch.ones_like(theta), theta) ** positions[:, None]
    return torch.view_as_real(pairs * phase[:, None]).flatten(-2)


def retention(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """(Q Kᵀ ⊙ D) V with rotary Q and K, the paper's parallel form, and the state of its recurrent form."""
    q, k, v = (heads(F.linear(x, weights[f"{n}_proj.weight"])) for n in "qkv")
    n = torch.arange(x.shape[1], dtype=x.dtype)
    q, k = turned(q, n), turned(k / math.sqrt(D), n)
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=x.dtype))
    distance = n[:, None] - n
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0)
    y = torch.einsum("bnhd,bmhd,hnm,bmhv->bnhv", q, k, decay, v)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    y = y.flatten(-2) * F.silu(F.linear(x, weights["g_proj.weight"]))
    # The paper's state is in the frame of position 0. Ours is seen from the last token: turn it back.
    state = torch.einsum("hm,bmhd,bmhv->bhvd", decay[:, -1], k, v)
    return F.linear(y, weights["o_proj.weight"]), turned(state.transpose(1, 2), -n[-1:]).transpose(1, 2).mT


def gated_linear_attention(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """S ← Diag(α) S + k vᵀ with α = σ(x W¹ W² + b)^{1/16}."""
    q, k, v = (heads(F.linear(x, weights[f"{n}_proj.weight"])) for n in "qkv")
    low = F.linear(x, weights["gk_proj.0.weight"])
    alpha = heads(torch.sigmoid(F.linear(low, weights["gk_proj.1.weight"], weights["gk_proj.1.bias"])) ** (1 / 16))
    S, reads = x.new_zeros(len(x), H, D, v.shape[-1]), []
    for t in range(x.shape[1]):
        S = alpha[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        reads.append((q[:, t, :, :, None] * S).sum(-2) / math.sqrt(D))
    y = rms_norm(torch.stack(reads, 1), weights["o_norm.weight"]).flatten(-2)
    return F.linear(y * F.silu(F.linear(x, weights["g_proj.weight"])), weights["o_proj.weight"]), S


CASES: dict[str, tuple[Callable[[], FilterLayer], Loop]] = {
    "deltanet": (lambda: DeltaNet(WIDTH, H, D, value_dim=M), delta_rule),
    "deltanet_gate": (lambda: DeltaNet(WIDTH, H, D, short_convolution=None, output_gate=True), delta_rule),
    "gated_deltanet": (lambda: GatedDeltaNet(WIDTH, H, D), delta_rule),
    "gated_deltanet_bare": (
        lambda: GatedDeltaNet(WIDTH, H, D, value_dim=M, short_convolution=None, output_gate=False),
        delta_rule,
    ),
    "longhorn": (lambda: Longhorn(WIDTH, H, D), longhorn),
    "longhorn_bare": (lambda: Longhorn(WIDTH, H, D, value_dim=M, short_convolution=None), longhorn),
    "linear_attention": (lambda: LinearAttention(WIDTH, H, D, value_dim=M), linear_attention),
    "retnet": (lambda: RetNet(WIDTH, H, D), retention),
    "gla": (lambda: GLA(WIDTH, H, D), gated_linear_attention),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients(name):
    make, loop = CASES[name]
    torch.manual_seed(0)
    layer = shaken(make()).double()
    x, weight = tokens(2, T).requires_grad_(), tokens(2, T, seed=3)
    weights = dict(layer.named_parameters())
    y, state = loop(weights, x)
    of_state = torch.randn(state.shape, generator=torch.Generator().manual_seed(4), dtype=state.dtype)
    wanted = torch.autograd.grad((y * weight).mean() + (state * of_state).mean(), [x, *weights.values()])
    ours, belief = layer(x)
    assert isinstance(layer, FilterLayer)
    found = torch.autograd.grad(
        (ours * weight).mean() + (belief.memory.mean * of_state).mean(), [x, *layer.parameters()]
    )
    assert_close(ours, y, 1e-9, "outputs")
    assert_close(belief.memory.mean, state, 1e-9, "state")
    for which, a, b in zip(("x", *weights), found, wanted, strict=True):
        scale = b.abs().max()
        assert scale > 0
        assert_close(a / scale, b / scale, 1e-9, which)
    stepped, last = in_pieces(layer, x, [0, 30, *range(31, T + 1)])
    assert_close(stepped, y, 1e-9, "outputs token by token")
    assert_close(last.memory.mean, state, 1e-9, "state token by token")


def test_longhorn_does_not_depend_on_how_columns_are_parted():
    few, many = (shaken(Longhorn(WIDTH, n, D)) for n in (1, 6))
    many.load_state_dict(few.state_dict())
    x = tokens(2, 20, dtype=torch.float32)
    assert_close(many(x)[0], few(x)[0], 1e-5)
