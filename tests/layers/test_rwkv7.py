"""RWKV-7: the contract, and the paper's equations as a loop over tokens."""

import math

import pytest
import torch

from layers.contract import WIDTH, LayerContract, shaken, tokens
from membydesign.layers import RWKV7, make_layer
from membydesign.layers.rwkv7 import LowRank
from membydesign.testing import assert_close


class TestRWKV7(LayerContract):
    def make(self):
        return make_layer("rwkv7", WIDTH, 3, 8)


class TestWideValues(LayerContract):
    def make(self):
        return RWKV7(WIDTH, 2, 6, value_dim=10, decay_rank=3, rate_rank=2, gate_rank=4, depth=0.5)


class WithFirstValue(torch.nn.Module):
    """A layer with a value residual, and another that gives the first values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = RWKV7(WIDTH, 2, 6, value_dim=4), RWKV7(WIDTH, 2, 6, value_dim=4, value_residual=True)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def loramlp(lora: LowRank, x: torch.Tensor) -> torch.Tensor:
    assert lora.c is not None
    return lora.B @ x + lora.c


def by_the_paper(layer: RWKV7, x: torch.Tensor, first: torch.Tensor | None = None, start: torch.Tensor | None = None):
    """Peng et al. 2025, section 4, one token and one head at a time; states as there, [M,D]."""
    B, T, _ = x.shape
    H, D, M = layer.num_heads, layer.key_dim, layer.value_dim
    outputs, states, values = [], [], []
    for b in range(B):
        S = [x.new_zeros(M, D) for _ in range(H)] if start is None else list(start[b])
        before = torch.zeros_like(x[b, 0])
        rows = []
        for t in range(T):
            now = x[b, t]
            x_r, x_w, x_k, x_v, x_a, x_g = (now + (before - now) * mu for mu in layer.mix)
            r, k, v = layer.r_proj.weight @ x_r, layer.k_proj.weight @ x_k, layer.v_proj.weight @ x_v
            w = torch.exp(-math.exp(-0.5) * sigmoid(loramlp(layer.decay, torch.tanh(layer.decay.A @ x_w))))
            a = sigmoid(loramlp(layer.rate, layer.rate.A @ x_a))
            g = layer.gate.B @ sigmoid(layer.gate.A @ x_g)
            values.append(v)
            if first is not None:
                share = layer.first_share
                assert share is not None
                v = v + (first[b, t].flatten() - v) * sigmoid(loramlp(share, share.A @ x_v))
            removal = k * layer.xi.flatten()
            replacement = k * (1 + (a - 1) * layer.alpha.flatten())
            heads = []
            for h in range(H):
                key, value = slice(h * D, (h + 1) * D), slice(h * M, (h + 1) * M)
                kappa = removal[key] / torch.sqrt((removal[key] ** 2).sum())
                change = torch.diag(w[key]) - torch.outer(kappa, a[key] * kappa)
                S[h] = S[h] @ change + torch.outer(v[value], replacement[key])
                p = S[h] @ r[key]
                p = (p - p.mean()) / torch.sqrt(p.var(correction=0) + layer.o_norm.eps)
                p = p * layer.o_norm.weight[value] + layer.o_norm.bias[value]
                heads.append(p + (r[key] * replacement[key] * layer.rho[h]).sum() * v[value])
            rows.append(layer.o_proj.weight @ (g * torch.cat(heads)))
            before = now
        outputs.append(torch.stack(rows))
        states.append(torch.stack(S))
    return torch.stack(outputs), torch.stack(states), torch.stack(values).view(B, T, H, M)


@pytest.mark.parametrize("options", [{}, {"value_dim": 9, "depth": 0.3}])
def test_the_paper(options):
    """Outputs, states and gradients of the input and every parameter, through outputs and states."""
    layer = shaken(RWKV7(WIDTH, 3, 6, **options)).double()
    assert isinstance(layer, RWKV7)
    x = tokens(2, 23).requires_grad_()
    y, belief = layer(x)
    wanted, states, _ = by_the_paper(layer, x)
    assert_close(y, wanted, 1e-9)
    assert_close(belief.memory.mean, states.mT, 1e-9)
    weight, of_state = tokens(2, 23, seed=4), torch.randn_like(states)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad((y * weight).sum() + (belief.memory.mean.mT * of_state).sum(), inputs)
    reference = torch.autograd.grad((wanted * weight).sum() + (states * of_state).sum(), inputs)
    for a, b in zip(found, reference, strict=True):
        assert_close(a, b, 1e-9)


def test_the_paper_with_the_first_value():
    pair = shaken(WithFirstValue()).double()  # pyright: ignore[reportArgumentType]
    assert isinstance(pair, WithFirstValue)
    x = tokens(2, 13)
    y, _, values = pair.first(x, return_value=True)
    z, belief = pair.second(y, first_value=values)
    wanted, _, first = by_the_paper(pair.first, x)
    assert_close(values, first, 1e-9)
    wanted, states, _ = by_the_paper(pair.second, wanted, first)
    assert_close(z, wanted, 1e-9)
    assert_close(belief.memory.mean, states.mT, 1e-9)
    inputs = list(pair.second.parameters())
    for a, b in zip(
        torch.autograd.grad(z.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs), strict=True
    ):
        assert_close(a, b, 1e-9)


def test_state_of_the_benchmark():
    """8,192 numbers at width 128 with 4 heads of 32, as the paper's table of models has it."""
    size = RWKV7(128, 4, 32, value_dim=64).state_size()
    assert (size.recurrent, size.convolution) == (8192, 128)


def test_memory_stays_in_float32():
    _, belief = RWKV7(WIDTH, 2, 8).bfloat16()(tokens(1, 5).bfloat16())
    assert belief.memory.mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_dim": 0}, "^value_dim: expected a whole number of at least 1, got 0$"),
        ({"depth": 1.0}, r"^depth: expected a number from 0 \(the first layer\) to below 1, got 1.0$"),
        ({"gate_rank": 0}, "^gate_rank: expected a whole number of at least 1, got 0$"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RWKV7(WIDTH, 2, 8, **options)


def test_bad_arguments_are_refused():
    x = tokens(1, 3, dtype=torch.float32)
    values = torch.zeros(1, 3, 2, 8)
    with pytest.raises(ValueError, match="^first_value: expected None"):
        RWKV7(WIDTH, 2, 8)(x, first_value=values)
    layer = RWKV7(WIDTH, 2, 8, value_residual=True)
    with pytest.raises(ValueError, match=r"^first_value: expected the values .*\[1, 3, 2, 8\].* got None$"):
        layer(x)
    _, belief = layer(x, first_value=values)
    with pytest.raises(
        ValueError, match=r"^initial.mean: expected shape \[1, 2, 8, 4\] for RWKV-7, got shape \[1, 2, 8"
    ):
        RWKV7(WIDTH, 2, 8, value_dim=4)(x, belief)


def test_meta_device():
    with torch.device("meta"):
        RWKV7(WIDTH, 2, 8, value_residual=True).reset_parameters()
