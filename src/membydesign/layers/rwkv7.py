"""RWKV-7 "Goose": the time mixing with a generalised delta rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import catalogue
from membydesign.layers.base import LayerBelief, Uncertainty, positive
from membydesign.layers.convolution import delayed
from membydesign.layers.filtered import FilterBelief, FilterLayer, StepInputs
from membydesign.layers.parameters import start_at, wide
from membydesign.layers.projected import NOISELESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.filter import Stretch
    from membydesign.filter.api import Backend, Method

FASTEST_LOG_DECAY = -math.exp(-0.5)
"""The logarithm of the fastest decay, 0.545."""
MIX_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""How the shares of the previous token start, for each of the six inputs."""


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
        """Start with A at zero, so that all tokens are treated alike, and a small orthogonal B."""
        nn.init.zeros_(self.A)
        gain = 0.1 * max(1.0, math.sqrt(self.B.shape[1] / self.B.shape[0]))
        # In float32, since half types have no QR.
        start_at(
            self.B, nn.init.orthogonal_(torch.empty(self.B.shape, dtype=torch.float32, device=self.B.device), gain)
        )
        if self.c is not None and self.start is not None:
            start_at(self.c, torch.as_tensor(self.start, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Map x, [...,inputs], to [...,outputs]."""
        x = F.linear(x, self.A)
        return F.linear(x if self.f is None else self.f(x), self.B, self.c)


@final
class RWKV7(FilterLayer):
    r"""The time mixing of RWKV-7 (Peng et al. 2025), in full.

    With $x^{\square}_t = x_t + \mu_\square \odot (x_{t-1} - x_t)$ for each of r, w, k, v, a, g, and per head

    $$r, k, v = W_r x^r,\ W_k x^k,\ W_v x^v, \quad w = e^{-e^{-1/2}\sigma(\mathrm{lora}(x^w))}, \quad
    a = \sigma(\mathrm{lora}(x^a)), \quad g = \mathrm{lora}(x^g)$$
    $$\hat\kappa = \frac{k \odot \xi}{\lVert k \odot \xi\rVert}, \qquad
    \tilde k = k \odot (1 + (a - 1) \odot \alpha)$$
    $$S_t = S_{t-1}\bigl(\mathrm{diag}(w_t) - \hat\kappa_t (a_t \odot \hat\kappa_t)^\top\bigr) + v_t \tilde k_t^\top$$
    $$y_t = W_o\,\bigl(g_t \odot (\mathrm{norm}(S_t r_t) + (r_t^\top (\rho \odot \tilde k_t))\, v_t)\bigr)$$

    Value residual: in the published model every layer but the first mixes its values with those of the first layer,
    $v_t + \nu_t \odot (v_t^{\text{first}} - v_t)$ with $\nu = \sigma(\mathrm{lora}(x^v))$. Request the values of
    the first layer, and pass them to layers made with `value_residual=True`:

        y, belief, values = first(x, return_value=True)
        y, belief = second(y, first_value=values)

    Args:
        value_residual: whether it mixes its values with those of the first layer.
        depth: where in the model the layer stands, from 0 for the first to below 1; starting values depend on it.
        decay_rank: of the low-rank map that gives w; default as published, about 1.8 √hidden_size.
        rate_rank: of the one that gives a; likewise.
        value_rank: of the one that gives ν; about 1.3 √hidden_size.
        gate_rank: of the one that gives g; about 0.6 hidden_size^0.8.

    `FilterLayer` documents the arguments that all layers share.

    Examples:
        >>> layer = RWKV7(128, num_heads=4, head_dim=32, value_dim=64)
        >>> y, belief = layer(torch.randn(3, 100, 128))
        >>> y_next, belief = layer(torch.randn(3, 1, 128), belief)
        >>> layer.state_size().recurrent
        8192
    """

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
        method: Method = "chunk",
        backend: Backend = "auto",
    ) -> None:
        columns = head_dim if value_dim is None else value_dim
        super().__init__(catalogue["rwkv7"], hidden_size, num_heads, head_dim, columns, method=method, backend=backend)
        n = hidden_size
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

    @property
    def look_back(self) -> int:
        """The previous token."""
        return 1

    def reset_parameters(self) -> None:
        """Start as published, with shares of the previous token and no bonus, but with the norm's weights at one."""
        channel = torch.arange(self.hidden_size, device="cpu") / self.hidden_size
        powers = torch.tensor(list(MIX_POWERS.values()), device="cpu") * (1 - self.depth)
        start_at(self.mix, 1 - channel ** powers[:, None])
        for module in (self.decay, self.rate, self.gate, self.first_share):
            if module is not None:
                module.reset_parameters()
        nn.init.constant_(self.xi, 0.85)
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.rho)

    @property
    def tail_size(self) -> int:
        """Elements of the last token."""
        return self.hidden_size

    def _initial_tails(self, like: Tensor) -> tuple[Tensor, ...]:
        """A token of zeros."""
        return (like.new_zeros(1, 1, self.hidden_size),)

    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
        return_evidence: bool = False,
        stretch: Stretch | None = None,
        first_value: Tensor | None = None,
        return_value: bool = False,
    ) -> tuple[Any, ...]:
        """Mix x, starting from a belief.

        Args:
            x: [B,T,hidden_size].
            belief: from an earlier call; None starts from an empty memory.
            cu_seqlens: boundaries of packed sequences, [N+1], with B = 1.
            return_variance: refused: this memory keeps no covariance.
            return_evidence: also return how expected each write was, as an `Uncertainty`.
            stretch: as `FilterLayer.forward` takes it.
            first_value: the values of the first layer for the same tokens, [B,T,H,M]; with `value_residual` only.
            return_value: also return this layer's own values, [B,T,H,M].

        Returns:
            y, [B,T,hidden_size], and the new belief; then the uncertainty and the values, if requested.
        """
        line = self._lengthened(x, belief, cu_seqlens, stretch)
        self._check_first_value(x, first_value)
        if first_value is not None:
            first_value = F.pad(first_value, (0, 0, 0, 0, line.past, 0))
        inputs, tails = self._mixed(line.x, line.tails, line.cu_seqlens, first_value)
        inputs = line.new(inputs)
        out = self._filter(x, inputs, belief, cu_seqlens, return_variance, return_evidence, stretch)
        results: list[Any] = [self.read_out(out.output, x, inputs), FilterBelief(out.belief, tails)]
        if return_variance or return_evidence:
            results.append(Uncertainty(out.variance, out.write_log_evidence))
        if return_value:
            results.append(inputs.aside[-1])
        return tuple(results)

    def step_inputs(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        """Compute queries, keys, values, decays and removals of x."""
        return self._mixed(x, tails, cu_seqlens, None)

    def _mixed(
        self, x: Tensor, tails: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None, first_value: Tensor | None
    ) -> tuple[StepInputs, tuple[Tensor, ...]]:
        (previous, x), tail = delayed(x, None if tails is None else tails[0], cu_seqlens, 2)
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
        bonus = (wide(r) * wide(self.rho) * k).sum(-1, keepdim=True).to(v.dtype) * v
        drift = {"log_decay": log_decay, "removal_key": removal_key, "removal": a * removal_key}
        return StepInputs(wide(r), k, wide(v), {**drift, **NOISELESS}, aside=(bonus, x_g, own)), (tail,)

    def read_out(self, y: Tensor, x: Tensor, inputs: StepInputs) -> Tensor:
        """Normalise each head, add the bonus, gate, and project back to the width."""
        bonus, x_g, _ = inputs.aside
        y = y.to(bonus.dtype)
        y = self.o_norm(y.flatten(0, 1).flatten(1)).view(*x.shape[:2], self.num_heads * self.value_dim)
        y = y + bonus.flatten(-2)
        return self.o_proj(y * self.gate(x_g))

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1))

    def _check_first_value(self, x: Tensor, first_value: Tensor | None) -> None:
        expected = (*x.shape[:2], self.num_heads, self.value_dim)
        if self.first_share is None:
            if first_value is not None:
                raise ValueError("first_value: expected None, since this layer has no value_residual, got a value")
        elif first_value is None or first_value.shape != expected:
            got = None if first_value is None else f"shape {list(first_value.shape)}"
            raise ValueError(
                f"first_value: expected the values of the first layer, {list(expected)}, since this layer has "
                f"value_residual, got {got}"
            )


def _rank(name: str, rank: int | None, default: float) -> int:
    """Return the rank that the user chose, or the multiple of 32 nearest to the default."""
    return max(32, round(default / 32) * 32) if rank is None else positive(name, rank)
