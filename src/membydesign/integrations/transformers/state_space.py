r"""Mamba-2 as Transformers calls it, on this library's kernels.

    S_t = e^{Δ_t A} S_{t−1} + Δ_t x_t B_tᵀ,   y_t = S_t C_t + D x_t

This is linear attention with a decay for each head: C is the query, B the key, x the value and Δ the strength of a
write. Values are [B,T,H,P], B and C are [B,T,G,N] for G groups of heads, states [B,H,P,N].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from membydesign.integrations.transformers.native import mean_pass
from membydesign.integrations.transformers.packing import boundaries, each
from membydesign.integrations.transformers.replaceable import Replacement


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Filter whole sequences; dt is [B,T,H], A is [H]. Packed sequences are kept apart."""
    del chunk_size  # the native code's own is faster, and results do not depend on it
    if options.get("z") is not None or dt.ndim != 3 or A.ndim != 1:
        return NotImplemented
    bounds = boundaries(hidden_states.shape[1], options)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    x, heads = hidden_states.float(), hidden_states.shape[2]
    read, write = (t.float().repeat_interleave(heads // t.shape[2], dim=2, output_size=heads) for t in (C, B))
    log_decay = (dt * A.float()).unsqueeze(-1)
    initial = None if initial_states is None else initial_states.float().mT
    output, state = each(bounds, _sequence, (read, write, x, dt.unsqueeze(-1), log_decay), initial)
    if D is not None:
        output = torch.addcmul(output, x, D.float().unsqueeze(-1))
    # A cache takes over the layout of the first state that it is given, and `state_update` needs a contiguous one.
    return (output, state.mT.contiguous()) if return_final_states else output


def _sequence(
    read: Tensor, write: Tensor, x: Tensor, dt: Tensor, log_decay: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, _, heads, size = read.shape
    mean = x.new_zeros(batch, heads, size, x.shape[-1]) if initial is None else initial
    return mean_pass(read, None, x, write, dt, log_decay, mean)


def state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Update a cached state in place by one token: x [B,H,P], dt [B,H,P] and A [H,P,N], the same along P and N."""
    del options
    shared = (dt.stride(2) == 0, A.stride()[1:] == (0, 0), dt_bias is None or dt_bias.stride(1) == 0)
    tensors = (state, hidden_states, dt, A, B, C, D, dt_bias, z)
    followed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if not all(shared) or followed or state.dtype != torch.float32 or not state.is_contiguous():
        return NotImplemented
    batch, heads, _, size = state.shape
    step = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[:, 0].to(dt.dtype)
    step = (F.softplus(step) if dt_softplus else step).float()
    decay = (step * A[:, 0, 0].float()).exp()
    x, groups = hidden_states.float(), B.shape[1]

    def of_heads(t: Tensor) -> Tensor:
        """[B,G,N] → [B·H,1,N]."""
        t = t.float().view(batch, groups, 1, size).expand(batch, groups, heads // groups, size)
        return t.reshape(batch * heads, 1, size)

    state.mul_(decay[..., None, None])
    flat = state.view(batch * heads, -1, size)
    flat.baddbmm_((x * step.unsqueeze(-1)).view(batch * heads, -1, 1), of_heads(B))
    out = torch.bmm(flat, of_heads(C).mT).view(x.shape)
    if D is not None:
        out = torch.addcmul(out, x, D.float())
    if z is not None:
        out = out * F.silu(z.float())
    return out.to(hidden_states.dtype)


def no_fused_block(*args: Any, **kwargs: Any) -> None:
    """Say that there is no kernel for convolution, scan, norm and projection together; layers then run them apart."""
    del args, kwargs


_SCAN = (
    *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus"),
    *("dt_limit", "return_final_states"),
)
_UPDATE = ("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z")
_FUSED = (
    *("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size", "initial_states", "dt_limit"),
    *("return_final_states", "activation", "rmsnorm_weight", "rmsnorm_eps", "outproj_weight", "outproj_bias"),
    *("headdim", "ngroups", "norm_before_gate"),
)

REPLACEMENTS = {
    "mamba2_chunk_scan": Replacement(_SCAN, chunk_scan),
    "mamba2_selective_state_update": Replacement(_UPDATE, state_update),
    "mamba2_split_conv1d_scan_combined": Replacement(_FUSED, no_fused_block),
}
"""By the names of Transformers' functions."""
