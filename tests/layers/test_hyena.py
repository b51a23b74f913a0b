"""Hyena: the contract, and the paper's recurrence with convolutions as plain sums."""

import math

import pytest
import torch

from layers.contract import WIDTH, LayerContract, bounds, shaken, tokens
from membydesign.layers import Hyena, make_layer
from membydesign.testing import assert_close


class TestHyena(LayerContract):
    def make(self):
        # Three sines of 14 times something, one in another, make rounding of weights that were moved at random grow ten
        # thousand times: a slower sine lets float32 be compared. `test_the_paper` has the default.
        return make_layer("hyena", WIDTH, 2, 8, max_length=64, sine_frequency=1.0)


class TestOrderThree(LayerContract):
    def make(self):
        return Hyena(WIDTH, order=3, max_length=16, short_convolution=4, bands=3, filter_width=8, shift=0.0)


def sums(h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Σ_{s≤t} h(t-s) z_s, term by term; h [n,T], z [B,T,n]."""
    y = torch.zeros_like(z)
    for t in range(z.shape[1]):
        for s in range(t + 1):
            y[:, t] += h[:, t - s] * z[:, s]
    return y


def filters_of_the_paper(layer: Hyena, T: int) -> torch.Tensor:
    """h^i(t) = window(t) · FFN(positional features of t), [N,n,T], one distance at a time."""
    f, L, n = layer.filters, layer.filters.max_length, layer.channels
    rows = []
    for t in range(T):
        angles = [2 * math.pi * k * t / L for k in range(f.bands)]
        x = torch.tensor([t / L, *map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
        for W, b in zip(f.weights, f.biases, strict=True):
            x = torch.sin(f.frequency * (W @ x + b))
        slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
        rates = [slow + (fast - slow) * c / (n - 1) for c in range(n)]
        window = torch.tensor([math.exp(-rate * t / L) for rate in rates], dtype=torch.float64)
        rows.append((f.out_weight @ x).view(layer.order, n) * (window + f.shift))
    return torch.stack(rows, -1)


def by_the_paper(layer: Hyena, x: torch.Tensor) -> torch.Tensor:
    """Algorithms 1 to 3 of Poli et al. 2023."""
    T = x.shape[1]
    u = x @ layer.in_proj.weight.T + layer.in_proj.bias
    taps = layer.convolution.weight[:, 0]
    width = taps.shape[1]
    assert layer.convolution.bias is not None
    short = torch.zeros_like(u) + layer.convolution.bias
    for j in range(width):
        delayed = torch.cat((torch.zeros_like(u[:, :j]), u[:, : T - j]), 1)
        short = short + taps[:, width - 1 - j] * delayed
    v, *gates = short.split(layer.channels, -1)
    h = filters_of_the_paper(layer, T)
    for i, gate in enumerate(gates):
        v = gate * (sums(h[i], v) + layer.skip[i] * v)
    return v @ layer.o_proj.weight.T + layer.o_proj.bias


@pytest.mark.parametrize("options", [{}, {"order": 3, "short_convolution": 2, "shift": 0.0}, {"max_length": 10}])
def test_the_paper(options):
    """Outputs and all gradients; also beyond max_length."""
    layer = shaken(Hyena(WIDTH, 3, 4, **{"max_length": 40, "bands": 4, "filter_width": 16, **options})).double()
    assert isinstance(layer, Hyena)
    x = tokens(2, 27).requires_grad_()
    y, _ = layer(x)
    wanted = by_the_paper(layer, x)
    assert_close(y, wanted, 1e-9)
    weight = tokens(2, 27, seed=4)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad((y * weight).sum(), inputs)
    for a, b in zip(found, torch.autograd.grad((wanted * weight).sum(), inputs), strict=True):
        assert_close(a, b, 1e-9)


def test_float32_at_the_starting_values():
    torch.manual_seed(0)
    layer = Hyena(WIDTH).double()
    x = tokens(2, 300)
    assert_close(layer.float()(x.float())[0].double(), layer.double()(x)[0], 5e-4)


def test_published_code_is_a_special_case():
    """Without the first long convolution: y = x² ⊙ (h ∗ (x¹ ⊙ v))."""
    layer = shaken(Hyena(WIDTH, max_length=30)).double()
    assert isinstance(layer, Hyena)
    n = layer.channels
    with torch.no_grad():
        layer.filters.out_weight[:n] = 0
        layer.skip[0] = 1
    x = tokens(1, 12)
    convolved, _ = layer.convolution(layer.in_proj(x), None)
    v, x1, x2 = convolved.split(n, -1)
    h = layer.filters(12)[1]
    wanted = layer.o_proj(x2 * (sums(h, x1 * v) + layer.skip[1] * x1 * v))
    assert_close(layer(x)[0], wanted, 1e-9)


def test_rows_of_different_lengths_go_on_as_a_batch():
    layer = shaken(Hyena(WIDTH, max_length=30)).double()
    pieces = [tokens(1, n, seed=n) for n in (4, 9)]
    _, belief = layer(torch.cat(pieces, 1), cu_seqlens=bounds(pieces))
    after = tokens(2, 3)
    y, belief = layer(after, belief)
    z, belief = layer(after[:, :1], belief)
    for i, piece in enumerate(pieces):
        _, own = layer(piece)
        wanted, own = layer(after[i : i + 1], own)
        assert_close(y[i : i + 1], wanted, 1e-9)
        assert_close(z[i : i + 1], layer(after[i : i + 1, :1], own)[0], 1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1}, "^order: expected at least 2, .* got 1$"),
        ({"max_length": 0}, "^max_length: expected a whole number of at least 1, got 0$"),
        ({"bands": 1.5}, "^bands: expected a whole number of at least 1, got 1.5$"),
        ({"filter_width": 0}, "^filter_width: expected a whole number"),
        ({"short_convolution": 0}, "^short_convolution: expected a whole number"),
        ({"sine_frequency": -1.0}, "^sine_frequency: expected a number of at least 0, got -1.0$"),
        ({"num_heads": 5}, f"^num_heads: expected a divisor of hidden_size = {WIDTH}, got 5$"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Hyena(WIDTH, **options)


def test_beliefs_of_other_layers_are_refused():
    x = tokens(1, 3, dtype=torch.float32)
    _, belief = Hyena(WIDTH)(x)
    with pytest.raises(ValueError, match="^belief.histories: expected 3, one for each order, got 2$"):
        Hyena(WIDTH, order=3)(x, belief)
    with pytest.raises(ValueError, match=r"^belief.histories: expected shape \[1, 3, 16\] for this layer"):
        Hyena(WIDTH, 2, 8)(x, belief)


def test_meta_device():
    with torch.device("meta"):
        Hyena(WIDTH).reset_parameters()
