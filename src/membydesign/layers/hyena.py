"""Hyena: long convolutions with implicit filters, and gates between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.filter.api import without_autocast
from membydesign.layers.base import LayerBelief, SequenceLayer, heads_of, positive
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.packing import Rows, after
from membydesign.layers.parameters import wide

SLOWEST, FASTEST = 1.5, 0.3
"""Over how many max_length the windows of the slowest and the fastest channel fall to `FALLEN`."""
FALLEN = 0.01


@final
@dataclass(frozen=True)
class HyenaBelief(LayerBelief):
    """All inputs of the long convolutions so far. It grows with every token.

    Sequences end in the same place; shorter ones begin with zeros, to which a convolution adds nothing.

    Attributes:
        histories: of each long convolution, [B,S,n].
        tails: the last inputs of the short convolution, [B,short_convolution-1,(order+1)·n].
    """

    histories: tuple[Tensor, ...]
    tails: tuple[Tensor, ...]


class ImplicitFilters(nn.Module):
    r"""Long filters, one for each order i and channel c, as a function of the distance t.

    $$h^i_c(t) = \bigl(e^{-\alpha_c t/L} + b\bigr)\; W_4 \sin(\omega \odot (W_3 \sin(\omega \odot (\cdots
    \phi(t)))))_{ic}, \qquad
    \phi(t) = \bigl(\tfrac tL,\ \cos\tfrac{2\pi k t}{L},\ \sin\tfrac{2\pi k t}{L}\bigr)_{k = 0, \dots, K-1}$$

    The rates $\alpha_c$ are fixed and spread over the channels, so that windows fall to 1 % after 0.3 L to 1.5 L.
    Filters are defined at every distance: beyond L the features go on as they are.

    Args:
        order: how many filters a channel has.
        channels: n.
        max_length: L, the unit of distance.
        bands: K.
        width: of the hidden layers.
        sine_frequency: where ω starts.
        shift: b, what a window falls to.
    """

    def __init__(
        self, order: int, channels: int, max_length: int, bands: int, width: int, sine_frequency: float, shift: float
    ) -> None:
        super().__init__()
        self.order, self.channels, self.sine_frequency, self.shift = order, channels, sine_frequency, shift
        self.max_length, self.bands = positive("max_length", max_length), positive("bands", bands)
        sizes = (2 * bands + 1, positive("filter_width", width), width, width)
        # Parameters rather than linear maps: a model that sets the weights of all linear maps should leave these alone.
        pairs = list(pairwise(sizes))
        self.weights = nn.ParameterList([torch.empty(m, n) for n, m in pairs])
        self.biases = nn.ParameterList([torch.empty(m) for _, m in pairs])
        self.out_weight = nn.Parameter(torch.empty(order * channels, width))
        self.frequency = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as `torch.nn.Linear` does, with one frequency for all."""
        for weight in (*self.weights, self.out_weight):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(bias, -bound, bound)
        nn.init.constant_(self.frequency, self.sine_frequency)

    def forward(self, length: int) -> Tensor:
        """Compute the filters at distances 0 to length-1, [order, n, length], in float32 at least."""
        dtype, device = torch.promote_types(self.frequency.dtype, torch.float32), self.frequency.device
        t = torch.arange(length, device=device).to(dtype)[:, None] / self.max_length
        # Whole turns are dropped before multiplying by 2π, which keeps phases exact at any distance.
        phase = 2 * math.pi * ((t * torch.arange(self.bands, device=device)) % 1)
        x = torch.cat((t, phase.cos(), phase.sin()), -1)
        with without_autocast(x):
            for weight, bias in zip(self.weights, self.biases, strict=True):
                x = torch.sin(wide(self.frequency) * F.linear(x, wide(weight), wide(bias)))
            x = F.linear(x, wide(self.out_weight)).mT.unflatten(0, (self.order, self.channels))
        rate = -math.log(FALLEN) * torch.linspace(1 / SLOWEST, 1 / FASTEST, self.channels, dtype=dtype, device=device)
        return x * ((-rate[:, None] * t[:, 0]).exp() + self.shift)


@final
class Hyena(SequenceLayer):
    r"""The Hyena operator (Poli et al. 2023): long convolutions and gates in turn.

    $$(v, x^1, \dots, x^N) = \text{short convolution}(W x), \qquad z^1 = v, \qquad
    z^{i+1}_t = x^i_t \odot \Bigl(\textstyle\sum_{s \le t} h^i(t - s) \odot z^i_s + d^i \odot z^i_t\Bigr), \qquad
    y = W_o z^{N+1}$$

    N long convolutions and N gates, as in the paper's Definition 3.1 and Algorithm 3. The code that its authors
    published leaves the first convolution out, which is this layer with $h^1 = 0$ and $d^1 = 1$. Convolutions run
    through FFTs, in float32 at least.

    Hyena has no heads. It mixes n = num_heads·head_dim channels, each by itself; only this product matters.

    Decoding a token reads all of the past, as attention does, and recomputes the filters up to that token.

    Args:
        hidden_size: the width of x and y.
        num_heads: with head_dim, the number of channels.
        head_dim: default hidden_size/num_heads.
        order: N, at least 2.
        max_length: the unit of the filters' distances, L: as long as sequences are expected to be. Longer ones run,
            with filters that go on beyond L as `ImplicitFilters` says.
        short_convolution: width of the short convolution.
        bands: K, frequencies of the filters' features.
        filter_width: of the network that gives the filters.
        sine_frequency: where the frequencies of its sines start.
        shift: what the filters' windows fall to.

    Filters start as in the code of the Zoology benchmark; more bands and higher frequencies give rougher ones.

    Examples:
        >>> layer = Hyena(64, max_length=128)
        >>> y, belief = layer(torch.randn(3, 100, 64))
        >>> y_next, belief = layer(torch.randn(3, 1, 64), belief)
        >>> [history.shape for history in belief.histories]
        [torch.Size([3, 101, 64]), torch.Size([3, 101, 64])]
    """

    no_initial_belief = "its Fourier transforms have a size that follows from the number of tokens, which a graph fixes"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 1,
        head_dim: int | None = None,
        *,
        order: int = 2,
        max_length: int = 2048,
        short_convolution: int = 3,
        bands: int = 1,
        filter_width: int = 64,
        sine_frequency: float = 1.0,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        self.hidden_size = positive("hidden_size", hidden_size)
        head_dim = heads_of(hidden_size, num_heads) if head_dim is None else positive("head_dim", head_dim)
        self.channels = n = positive("num_heads", num_heads) * head_dim
        if positive("order", order) < 2:
            raise ValueError(f"order: expected at least 2, since Hyena is gates between convolutions, got {order}")
        for name, value in (("sine_frequency", sine_frequency), ("shift", shift)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected a number of at least 0, got {value!r}")
        self.order = order
        self.in_proj = nn.Linear(hidden_size, (order + 1) * n)
        self.convolution = ShortConvolution((order + 1) * n, short_convolution, bias=True, silu=False)
        self.filters = ImplicitFilters(order, n, max_length, bands, filter_width, sine_frequency, shift)
        self.skip = nn.Parameter(torch.empty(order, n))
        self.o_proj = nn.Linear(n, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the starting values of filters and short convolution, and normal skips."""
        self.convolution.reset_parameters()
        self.filters.reset_parameters()
        nn.init.normal_(self.skip)

    def extra_repr(self) -> str:
        """Show the sizes."""
        length = self.filters.max_length
        return f"hidden_size={self.hidden_size}, channels={self.channels}, order={self.order}, max_length={length}"

    def state_size(self) -> None:
        """Return None: it grows with the sequence, by order·n numbers a token."""

    def forward(
        self, x: Tensor, belief: LayerBelief | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, HyenaBelief]:
        """Mix x, [B,T,hidden_size], after the tokens of a belief; return y of the same shape and the new belief.

        Packed sequences are computed as a batch whose rows are as long as the longest.
        """
        self.check(x, belief, HyenaBelief, cu_seqlens)
        assert belief is None or isinstance(belief, HyenaBelief)
        past = 0 if belief is None else self._check_shapes(belief)
        rows = Rows.of(cu_seqlens, x)
        projected, tail = self.convolution(self.in_proj(x), None if belief is None else belief.tails[0], cu_seqlens)
        if rows is not None:
            projected = rows.places.spread(projected)
        z, *gates = projected.chunk(self.order + 1, -1)
        filters = self.filters(past + z.shape[1])
        histories: list[Tensor] = []
        for i, gate in enumerate(gates):
            # A copy of the first, since a view would keep the gates in memory too.
            histories.append(after(None if belief is None else belief.histories[i], z.contiguous(), rows))
            # Empty places stay zero, since the gate is zero in them.
            z = gate * (_convolved(histories[i], filters[i], z.shape[1]).to(z.dtype) + self.skip[i] * z)
        return self.o_proj(z if rows is None else rows.places.pack(z)), HyenaBelief(tuple(histories), (tail,))

    def _check_shapes(self, belief: HyenaBelief) -> int:
        """Refuse a belief of another layer; return S."""
        if len(belief.histories) != self.order:
            raise ValueError(
                f"belief.histories: expected {self.order}, one for each order, got {len(belief.histories)}"
            )
        batch, S = belief.histories[0].shape[:2]
        for history in belief.histories:
            if history.shape != (batch, S, self.channels):
                raise ValueError(
                    f"belief.histories: expected shape {[batch, S, self.channels]} for this layer, "
                    f"got {list(history.shape)}"
                )
        return S


def _convolved(z: Tensor, h: Tensor, T: int) -> Tensor:
    """Compute the last T of Σ_{s≤t} h(t-s) z_s, [B,T,n], for z [B,S,n] and h [n,S]; in float32 at least."""
    z, h = wide(z), wide(h)
    S = z.shape[1]
    if T == 1:
        return torch.einsum("bsn,ns->bn", z, h.flip(-1))[:, None]
    # A circle of S+T-1 places: what comes round falls on places before the last T.
    size = 1 << (S + T - 2).bit_length()
    y = torch.fft.irfft(torch.fft.rfft(z.mT, size) * torch.fft.rfft(h, size), size)
    return y[..., S - T : S].mT
