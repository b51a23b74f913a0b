"""Causal softmax attention: the baseline that keeps every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.filter.context.exchange import anchored, receive, send, tied
from membydesign.layers.base import LayerBelief, SequenceLayer, positive
from membydesign.layers.packing import Rows, after
from membydesign.layers.parameters import wide
from membydesign.layers.projected import divisor_of_heads

if TYPE_CHECKING:
    from membydesign.filter import Stretch


@final
@dataclass(frozen=True)
class AttentionBelief(LayerBelief):
    """All keys and values so far. It grows with every token.

    Sequences end in the same place; shorter ones begin with empty places, which are zeros.

    Attributes:
        keys: turned to their positions, [B,S,H,D], H counting key heads.
        values: [B,S,H,D].
        lengths: tokens of each sequence, [B]; None where all have S.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor | None = None


@final
class SoftmaxAttention(SequenceLayer):
    r"""Causal softmax attention with rotary positions (Vaswani et al. 2017; Su et al. 2021).

    $$y_t = W_o \sum_{s \le t} \mathrm{softmax}_s\!\left(\frac{(R_t q_t)^\top (R_s k_s)}{\sqrt D}\right) v_s$$

    $R_t$ turns entries i and i + D/2 of a head by $t\,\theta^{-2i/D}$, as in Llama. Positions count from the first
    token of each sequence, so that they need no argument: the belief knows them.

    Args:
        hidden_size: the width of x and y.
        num_heads: H, heads of queries.
        head_dim: D.
        num_key_heads: heads of keys and values, each shared by H/num_key_heads heads of queries; default H.
        rope_theta: θ; None for no positions.

    Examples:
        >>> layer = SoftmaxAttention(64, num_heads=4, head_dim=16, num_key_heads=2)
        >>> y, belief = layer(torch.randn(3, 100, 64))
        >>> y_next, belief = layer(torch.randn(3, 1, 64), belief)
        >>> belief.keys.shape
        torch.Size([3, 101, 2, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_key_heads: int | None = None,
        rope_theta: float | None = 10000.0,
    ) -> None:
        super().__init__()
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads, self.head_dim = positive("num_heads", num_heads), positive("head_dim", head_dim)
        self.num_key_heads = divisor_of_heads(num_heads if num_key_heads is None else num_key_heads, num_heads)
        self.rope_theta = rope_theta
        if rope_theta is not None:
            number = isinstance(rope_theta, (int, float)) and not isinstance(rope_theta, bool)
            if not number or not math.isfinite(rope_theta) or rope_theta <= 0:
                raise ValueError(f"rope_theta: expected a number above 0, or None for no positions, got {rope_theta!r}")
            if head_dim % 2:
                raise ValueError(
                    "head_dim: expected an even number, since rotary positions turn pairs of entries (rope_theta=None "
                    f"has none), got {head_dim}"
                )
        keys = self.num_key_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing: all its parameters are weights of linear maps."""

    def extra_repr(self) -> str:
        """Show the sizes."""
        sizes = f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        return f"{sizes}, num_key_heads={self.num_key_heads}, rope_theta={self.rope_theta}"

    def state_size(self) -> None:
        """Return None: it grows with the sequence, by 2·num_key_heads·D numbers a token."""

    def why_not_split(self) -> None:
        """None: the keys and values of earlier tokens come from the processes that hold them."""

    def initial_belief(self) -> AttentionBelief:
        """Return no key and no value, for one sequence."""
        nothing = self.k_proj.weight.new_zeros(1, 0, self.num_key_heads, self.head_dim)
        return AttentionBelief(nothing, nothing)

    def forward(
        self,
        x: Tensor,
        belief: LayerBelief | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        stretch: Stretch | None = None,
    ) -> tuple[Tensor, AttentionBelief]:
        """Mix x, [B,T,hidden_size], after the tokens of a belief; return y of the same shape and the new belief.

        Packed sequences are computed as a batch whose rows are as long as the longest. With a `stretch`, x has this
        process's tokens of a sequence that is split over processes, and the keys and values of all tokens before them
        come from the process before: what is sent grows with the sequence.
        """
        self.check(x, belief, AttentionBelief, cu_seqlens, stretch)
        if stretch is not None:
            if belief is not None:
                raise ValueError("belief: expected None with a stretch, which brings the tokens before x, got some")
            bounds = stretch.own_bounds()
            cu_seqlens = None if bounds is None else torch.tensor(bounds, device=x.device)
        rows = Rows.of(cu_seqlens, x)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if stretch is not None:
            belief = _received(k, v, stretch, rows)
        assert belief is None or isinstance(belief, AttentionBelief)
        past = 0 if belief is None else self._check_shapes(belief)
        if rows is not None:
            q, k, v = (rows.places.spread(y) for y in (q, k, v))
        lengths = _lengths(belief, q, rows)
        if self.rope_theta is not None:
            q, k = self._turned(q, k, past, lengths)
        new = AttentionBelief(
            after(None if belief is None else belief.keys, k, rows),
            after(None if belief is None else belief.values, v, rows),
            lengths,
        )
        if stretch is not None:
            q = tied(q, _handed_on(new, k, stretch))
        mask = _mask(q.shape[1], new.keys.shape[1], lengths, x.device)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            new.keys.transpose(1, 2),
            new.values.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and q.shape[1] > 1,
            enable_gqa=self.num_key_heads != self.num_heads,
        )
        y = y.transpose(1, 2).flatten(2)
        return self.o_proj(y if rows is None else rows.places.pack(y)), new

    def _turned(self, q: Tensor, k: Tensor, past: int, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Turn queries and keys to their positions; the last new token of a sequence is the last of all."""
        assert self.rope_theta is not None
        T, D = q.shape[1], self.head_dim
        position = torch.arange(T, device=q.device)
        position = position + past if lengths is None else position + (lengths[:, None] - T)
        dtype = torch.promote_types(q.dtype, torch.float32)
        # Powers of a tensor on the device, not a buffer: they follow the type of the input and need no storage.
        frequency = self.rope_theta ** (-torch.arange(0, D, 2, device=q.device).to(dtype) / D)
        angle = (position.to(dtype)[..., None] * frequency)[..., None, :]  # [T,1,D/2] or [B,T,1,D/2]
        cos, sin = angle.cos(), angle.sin()
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def _check_shapes(self, belief: AttentionBelief) -> int:
        """Refuse a belief of another layer; return S."""
        batch, S = belief.keys.shape[:2]
        expected = (batch, S, self.num_key_heads, self.head_dim)
        for name, part in (("keys", belief.keys), ("values", belief.values)):
            if part.shape != expected:
                raise ValueError(
                    f"belief.{name}: expected shape {list(expected)} for this layer, got {list(part.shape)}"
                )
        return S


def _received(k: Tensor, v: Tensor, stretch: Stretch, rows: Rows | None) -> AttentionBelief | None:
    """The keys and values of earlier tokens of the sequences that k and v, [B,T,H,D], go on with; None if none have."""
    S = stretch.before
    if not S:
        return None
    shape = torch.Size((k.shape[0], S, *k.shape[2:]))
    past = receive([shape, shape], k, anchored([k, v]), stretch.previous, stretch.group)
    if rows is None:
        return AttentionBelief(*past)
    # only the first of the packed sequences began before
    N = len(rows.lengths)
    keys, values = (torch.cat((x, x.new_zeros(N - 1, *x.shape[1:]))) for x in past)
    lengths = torch.zeros(N, dtype=torch.long, device=k.device)
    lengths[0] = S
    return AttentionBelief(keys, values, lengths)


def _handed_on(new: AttentionBelief, k: Tensor, stretch: Stretch) -> list[Tensor]:
    """Send the keys and values of the last sequence to the process that goes on with it, if one does."""
    if not stretch.leaves or not stretch.after:
        return []
    first = new.keys.shape[1] - stretch.after
    sent = [x[:, first:] if stretch.bounds is None else x[-1:, first:] for x in (new.keys, new.values)]
    return [send(sent, anchored([k]), stretch.next, stretch.group)]


def _lengths(belief: AttentionBelief | None, q: Tensor, rows: Rows | None) -> Tensor | None:
    """Count the tokens of each sequence after q, [B,T,H,D]; None where no place is empty."""
    known = None if belief is None else belief.lengths
    if known is not None:
        return known + (q.shape[1] if rows is None else rows.lengths)
    if rows is None or rows.even:
        return None
    return rows.lengths + (0 if belief is None else belief.keys.shape[1])


def _mask(T: int, S: int, lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which of S keys the last T tokens see, [T,S] or [B,1,T,S]; None for plain causal attention."""
    if lengths is None and T in (1, S):
        return None
    key = torch.arange(S, device=device)
    own = torch.arange(S - T, S, device=device)[:, None]
    if lengths is None:
        return key <= own
    present = key >= S - lengths[:, None, None]
    # An empty place sees itself, since a softmax over no key at all is NaN.
    return ((key <= own) & (present | (key == own)))[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first half of each head's entries with the second, in float32 at least."""
    a, b = wide(x).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
