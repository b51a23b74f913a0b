"""Short causal convolutions, and the past inputs that they need."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.layers.base import positive
from membydesign.layers.packing import shifted


def delayed(x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, width: int) -> tuple[list[Tensor], Tensor]:
    """Pair each token with the ones before it: x_{t-width+1}, …, x_t.

    Args:
        x: [B,T,n], or N packed sequences, [1,T,n].
        tail: the width-1 tokens before x, [B or N, width-1, n]; None for zeros.
        cu_seqlens: boundaries of packed sequences, [N+1].
        width: number of tokens, at least 1.

    Returns:
        width tensors of the shape of x, the oldest first, and the tail for what comes next.
    """
    past = width - 1
    batch = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if tail is None:
        tail = x.new_zeros(batch, past, x.shape[-1])
    elif tail.shape != (batch, past, x.shape[-1]):
        raise ValueError(
            f"belief.tails: expected shape {[batch, past, x.shape[-1]]} for this layer, got {list(tail.shape)}"
        )
    tail = tail.to(x.dtype)
    if cu_seqlens is None:
        line = torch.cat((tail, x), 1)
        T = x.shape[1]
        # A copy, since a view would keep the whole line in memory.
        return [line[:, i : i + T] for i in range(width)], line[:, T:].clone()
    # Every sequence gets its tail in front of it, so that no token sees another sequence.
    bounds = cu_seqlens.to(x.device, torch.long)
    n = torch.arange(batch, device=x.device)
    place = shifted(bounds.diff(), past * (n + 1), x.shape[1])
    steps = torch.arange(past, device=x.device)
    tails = ((bounds[:-1] + past * n)[:, None] + steps).flatten()
    line = torch.cat((tail.reshape(batch * past, x.shape[-1]), x[0]))
    order = torch.empty(len(line), dtype=torch.long, device=x.device)
    order[torch.cat((tails, place))] = torch.arange(len(line), device=x.device)
    line = line[order]
    ends = ((bounds[1:] + past * n)[:, None] + steps).flatten()
    return [line[place - past + i][None] for i in range(width)], line[ends].view(batch, past, x.shape[-1])


class ShortConvolution(nn.Module):
    r"""A causal convolution of each channel by itself, then SiLU: $y_t = \mathrm{SiLU}(b + \sum_j w_j x_{t-j})$.

    Args:
        channels: n.
        width: taps of the filter; 1 only scales, and starts as SiLU alone.
        bias: whether to add b.
        silu: whether to apply SiLU.

    Weights are [n,1,width], the newest tap last, as in `torch.nn.Conv1d`.
    """

    def __init__(self, channels: int, width: int = 4, *, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu
        self.channels, self.width = positive("channels", channels), positive("short_convolution", width)
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as `torch.nn.Conv1d` does; a single tap, which only scales channels, starts at 1."""
        if self.width == 1:
            nn.init.ones_(self.weight)
            if self.bias is not None:
                nn.init.zeros_(self.bias)
            return
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def state_size(self) -> int:
        """Elements of the tail of one sequence."""
        return (self.width - 1) * self.channels

    def forward(self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve x, [B,T,n], after a tail, [B,width-1,n] (None: zeros); return y and the tail of what comes next."""
        # Shifted products are faster than conv1d on a CPU, above all backwards, and need no transposition.
        delays, tail = delayed(x, tail, cu_seqlens, self.width)
        taps = self.weight[:, 0].unbind(-1)
        y = delays[0] * taps[0] if self.bias is None else torch.addcmul(self.bias, delays[0], taps[0])
        for delay, tap in zip(delays[1:], taps[1:], strict=True):
            y = torch.addcmul(y, delay, tap)
        return F.silu(y) if self.silu else y, tail

    def extra_repr(self) -> str:
        """Show channels and width."""
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}, silu={self.silu}"
