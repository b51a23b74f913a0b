"""RWKV-7 "Goose": the time mixing with a generalised delta rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.layers.base import LayerBelief, LayerStateSize, SequenceLayer, positive, shown_way
from membydesign.layers.convolution import delayed
from membydesign.layers.parameters import start_at, wide
from membydesign.ops import generalised_delta_rule
from membydesign.ops.filtering import check_way
from membydesign.ops.generalised_delta.sequence import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable

FASTEST_LOG_DECAY = -math.exp(-0.5)
"""The logarithm of the fastest decay, 0.545."""
MIX_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""How the shares of the previous token start, for each of the six inputs."""


@final
@dataclass(frozen=True)
class RWKV7Belief(LayerBelief):
    """The memory of every head, and the last token.

    Attributes:
        memory: [B,H,D,M], float32 at least; the transpose of the paper's state.
        tails: the last token, [B,1,hidden_size].
    """

    memory: Tensor
    tails: tuple[Tensor, ...]


class LowRank(nn.Module):
    r"""A map through few dimensions, $f(x A) B + c$: what the paper calls a loramlp.

    Args:
        inputs: the width of x.
        rank: how many dimensions.
        outputs: the width of the result.
        f: between the two maps.
        start: where c starts, [outputs] or a number; None for no c.
    """

    def __init__(
        self, inputs: int, rank: int, outputs: int, f: Callable[[Tensor], Tensor] | None, start: Tensor | float | None
    ) -> None:
        super().__init__()
        self.f, self.start = f, start
        self.A = nn.Parameter(torch.empty(rank, inputs))
        self.B = nn.Parameter(torch.empty(outputs, rank))
        self.c = None if start is None else nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A at zero, so that all tokens start alike; B orthogonal, small."""
        nn.init.zeros_(self.A)
        gain = 0.1 * max(1.0, math.sqrt(self.B.shape[1] / self.B.shape[0]))
        # In float32, since half types have no QR.
        start_at(
            self.B, nn.init.orthogonal_(torch.empty(self.B.shape, dtype=torch.float32, device=self.B.device), gain)
        )
        if self.c is not None and self.start is not None:
            start_at(self.c, torch.as_tensor(self.start, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """The map of x, [...,inputs]: [...,outputs]."""
        x = F.linear(x, self.A)
        return F.linear(x if self.f is None else self.f(x), self.B, self.c)


@final
class RWKV7(SequenceLayer):
    r"""The time mixing of RWKV-7 (Peng et al. 2025), in full.

    With $x^{\square}_t = x_t + \mu_\square \odot (x_{t-1} - x_t)$ for each of r, w, k, v, a, g, and per head

    $$r, k, v = W_r x^r,\ W_k x^k,\ W_v x^v, \quad w = e^{-e^{-1/2}\sigma(\mathrm{lora}(x^w))}, \quad
    a = \sigma(\mathrm{lora}(x^a)), \quad g = \mathrm{lora}(x^g)$$
    $$\hat\kappa = \frac{k \odot \xi}{\lVert k \odot \xi\rVert}, \qquad
    \tilde k = k \odot (1 + (a - 1) \odot \alpha)$$
    $$S_t = S_{t-1}\bigl(\mathrm{diag}(w_t) - \hat\kappa_t (a_t \odot \hat\kappa_t)^\top\bigr) + v_t \tilde k_t^\top$$
    $$y_t = W_o\,\bigl(g_t \odot (\mathrm{norm}(S_t r_t) + (r_t^\top (\rho \odot \tilde k_t))\, v_t)\bigr)$$

    Value residual: in the published model every layer but the first mixes its values with those of the first layer,
    $v_t + \nu_t \odot (v_t^{\text{first}} - v_t)$ with $\nu = \sigma(\mathrm{lora}(x^v))$. Ask the first layer for its
    values, and hand them to layers made with `value_residual=True`:

        y, belief, values = first(x, return_value=True)
        y, belief = second(y, first_value=values)

    Args:
        hidden_size: the width of x and y.
        num_heads: H.
        head_dim: D, rows of each head's memory.
        value_dim: M, its columns; default head_dim, as in the paper.
        value_residual: whether it mixes its values with those of the first layer.
        depth: where in the model the layer stands, from 0 for the first to below 1; starting values depend on it.
        decay_rank: of the low-rank map that gives w; default as published, about 1.8 √hidden_size.
        rate_rank: of the one that gives a; likewise.
        value_rank: of the one that gives ν; about 1.3 √hidden_size.
        gate_rank: of the one that gives g; about 0.6 hidden_size^0.8.
        norm_eps: ε of the norm of each head.
        method: "chunk" or "recurrent", as `generalised_delta_rule` takes it.
        backend: likewise; "torch" can be differentiated more than once.

    Example:
        >>> layer = RWKV7(128, num_heads=4, head_dim=32, value_dim=64)
        >>> y, belief = layer(torch.randn(3, 100, 128))
        >>> y_next, belief = layer(torch.randn(3, 1, 128), belief)
        >>> layer.state_size().recurrent
        8192
    """

    method: Literal["chunk", "recurrent"] = "chunk"  # also of layers that were pickled before they had it
    backend: Literal["auto", "torch", "cpu"] = "auto"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        value_residual: bool = False,
        depth: float = 0.0,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        norm_eps: float = 64e-5,
        method: Literal["chunk", "recurrent"] = "chunk",
        backend: Literal["auto", "torch", "cpu"] = "auto",
    ) -> None:
        super().__init__()
        check_way(method, backend, BACKENDS)
        self.method, self.backend = method, backend
        self.hidden_size = n = positive("hidden_size", hidden_size)
        self.num_heads, self.head_dim = positive("num_heads", num_heads), positive("head_dim", head_dim)
        self.value_dim = head_dim if value_dim is None else positive("value_dim", value_dim)
        if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth < 1:
            raise ValueError(f"depth: expected a number from 0 (the first layer) to below 1, got {depth!r}")
        self.depth = depth
        keys, values = num_heads * head_dim, num_heads * self.value_dim
        root = math.sqrt(n)
        self.mix = nn.Parameter(torch.empty(len(MIX_POWERS), n))
        self.r_proj = nn.Linear(n, keys, bias=False)
        self.k_proj = nn.Linear(n, keys, bias=False)
        self.v_proj = nn.Linear(n, values, bias=False)
        decays = -6.5 + 5 * torch.linspace(0, 1, keys, device="cpu") ** (0.85 + math.sqrt(depth))
        self.decay = LowRank(n, _rank("decay_rank", decay_rank, 1.8 * root), keys, torch.tanh, decays)
        self.rate = LowRank(n, _rank("rate_rank", rate_rank, 1.8 * root), keys, None, 0.0)
        self.gate = LowRank(n, _rank("gate_rank", gate_rank, 0.6 * n**0.8), values, torch.sigmoid, None)
        share = LowRank(n, _rank("value_rank", value_rank, 1.3 * root), values, None, 1.0) if value_residual else None
        self.first_share = share
        self.xi = nn.Parameter(torch.empty(num_heads, head_dim))
        self.alpha = nn.Parameter(torch.empty(num_heads, head_dim))
        self.rho = nn.Parameter(torch.empty(num_heads, head_dim))
        self.o_norm = nn.GroupNorm(num_heads, values, eps=norm_eps)
        self.o_proj = nn.Linear(values, n, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As published, but for the norm's weights, which start at one: shares of the previous token, and no bonus."""
        channel = torch.arange(self.hidden_size, device="cpu") / self.hidden_size
        powers = torch.tensor(list(MIX_POWERS.values()), device="cpu") * (1 - self.depth)
        start_at(self.mix, 1 - channel ** powers[:, None])
        for module in (self.decay, self.rate, self.gate, self.first_share):
            if module is not None:
                module.reset_parameters()
        nn.init.constant_(self.xi, 0.85)
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.rho)

    def extra_repr(self) -> str:
        """Sizes, and how the memory is computed if not as usual."""
        sizes = f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, D={self.head_dim}, M={self.value_dim}"
        return "\n".join((sizes, *shown_way(self.method, self.backend)))

    def state_size(self) -> LayerStateSize:
        """The memories, and the last token."""
        return LayerStateSize(self.num_heads * self.head_dim * self.value_dim, convolution=self.hidden_size)

    @overload
    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        first_value: Tensor | None = None,
        return_value: Literal[False] = False,
    ) -> tuple[Tensor, RWKV7Belief]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        first_value: Tensor | None = None,
        return_value: Literal[True],
    ) -> tuple[Tensor, RWKV7Belief, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        first_value: Tensor | None = None,
        return_value: bool = False,
    ) -> tuple[Tensor, RWKV7Belief] | tuple[Tensor, RWKV7Belief, Tensor]:
        """Mix x, starting from a belief.

        Args:
            x: [B,T,hidden_size].
            belief: from an earlier call; None starts from an empty memory.
            cu_seqlens: boundaries of packed sequences, [N+1], with B = 1.
            first_value: the values of the first layer for the same tokens, [B,T,H,M]; with `value_residual` only.
            return_value: also return this layer's own values, [B,T,H,M].

        Returns:
            y, [B,T,hidden_size], and the new belief; and the values if asked for.
        """
        batch = self.check(x, belief, RWKV7Belief, cu_seqlens)
        assert belief is None or isinstance(belief, RWKV7Belief)
        self._check_shapes(x, belief, batch, first_value)
        (previous, x), tail = delayed(x, None if belief is None else belief.tails[0], cu_seqlens, 2)
        change = previous - x
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, change, share) for share in self.mix)
        r, k, v = self._heads(self.r_proj(x_r)), wide(self._heads(self.k_proj(x_k))), self._heads(self.v_proj(x_v))
        log_decay = FASTEST_LOG_DECAY * self._heads(wide(self.decay(x_w))).sigmoid()
        a = self._heads(wide(self.rate(x_a))).sigmoid()
        removal_key = F.normalize(k * wide(self.xi), dim=-1)
        k = k * (1 + (a - 1) * wide(self.alpha))
        own = v
        if self.first_share is not None and first_value is not None:
            v = torch.lerp(v, first_value.to(v.dtype), self._heads(self.first_share(x_v)).sigmoid())
        try:
            y, memory = generalised_delta_rule(
                log_decay,
                removal_key,
                a * removal_key,
                k,
                v,
                r,
                initial=None if belief is None else belief.memory,
                cu_seqlens=cu_seqlens,
                method=self.method,
                backend=self.backend,
            )
        except ValueError as error:
            self.refuse_non_finite(x, error)
            raise
        bonus = (wide(r) * wide(self.rho) * k).sum(-1, keepdim=True).to(v.dtype) * v
        y = self.o_norm(y.flatten(0, 1).flatten(1)).view(*x.shape[:2], -1) + bonus.flatten(-2)
        y, new = self.o_proj(y * self.gate(x_g)), RWKV7Belief(memory, (tail,))
        return (y, new, own) if return_value else (y, new)

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1))

    def _check_shapes(self, x: Tensor, belief: RWKV7Belief | None, batch: int, first_value: Tensor | None) -> None:
        wanted = (batch, self.num_heads, self.head_dim, self.value_dim)
        if belief is not None and belief.memory.shape != wanted:
            raise ValueError(
                f"belief.memory: expected shape {list(wanted)} for this layer, got {list(belief.memory.shape)}"
            )
        wanted = (*x.shape[:2], self.num_heads, self.value_dim)
        if self.first_share is None:
            if first_value is not None:
                raise ValueError(
                    "first_value: expected None, since this layer was made without value_residual, got one"
                )
        elif first_value is None or first_value.shape != wanted:
            got = None if first_value is None else f"shape {list(first_value.shape)}"
            raise ValueError(
                f"first_value: expected the values of the first layer, {list(wanted)}, since this layer was made with "
                f"value_residual, got {got}"
            )


def _rank(name: str, given: int | None, about: float) -> int:
    """The rank that was given, or the nearest multiple of 32."""
    return max(32, round(about / 32) * 32) if given is None else positive(name, given)
