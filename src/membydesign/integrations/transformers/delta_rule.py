r"""Gated DeltaNet and KDA as Transformers calls them, on this library's kernels.

    S_t = (I − β_t k_t k_tᵀ) A_t S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t / √D

A_t is a number for each head (Gated DeltaNet) or for each row (KDA). Whole sequences run the native mean pass, tokens
after a cached state the native decoding step. q and k are [B,T,H,D], v is [B,T,H,M], states are [B,H,D,M]. As in
Transformers' code, everything is computed in float32 whatever the type of the model. q and k may have fewer heads
than v, each for several heads of values (Transformers repeats them itself before version 5.23).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design import DecayAndRemoval, DesignModel, LatentInput, MeanOnly
from membydesign.filter.native.step import native_step
from membydesign.integrations.transformers.native import mean_pass, without_subnormals
from membydesign.integrations.transformers.packing import boundaries, each
from membydesign.integrations.transformers.replaceable import Replacement
from membydesign.layers.projected import for_every_head

EPS = 1e-6
"""ε of the L2 norm of queries and keys, a constant of Transformers' functions."""

DECODING = DesignModel(DecayAndRemoval(), LatentInput(), MeanOnly())
"""The delta rule as a transition, A_t − β_t k_t (A_t k_t)ᵀ, and an additive write of β_t v_t at k_t."""
NOISELESS = {"prior_variance": 1.0, "write_noise": 0.0}


class _Unit(torch.autograd.Function):
    """Compute s·x / √(‖x‖² + ε) along the last axis; backward keeps the result alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        factor = torch.linalg.vecdot(x, x).add_(EPS).rsqrt_().unsqueeze(-1)
        y = x * (factor * scale)
        if ctx is not None:
            ctx.save_for_backward(y, factor)
            ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy,) = grads
        y, factor = ctx.saved_tensors
        along = torch.linalg.vecdot(y, dy).unsqueeze(-1) / ctx.scale**2
        return torch.addcmul(dy, y, along, value=-1).mul_(factor * ctx.scale), None


def _unit(x: Tensor, scale: float = 1.0) -> Tensor:
    return _Unit.apply(x, scale)


def _prepared(query: Tensor, key: Tensor, heads: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Queries, normalised if requested and divided by √D, and keys, in float32 and for every head of values."""
    query, key = query.float(), key.float()
    scale = query.shape[-1] ** -0.5
    query, key = (_unit(query, scale), _unit(key)) if normalise else (query * scale, key)
    return for_every_head(query, heads), for_every_head(key, heads)


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, _, H, D = key.shape
    mean = key.new_zeros(B, H, D, value.shape[-1]) if initial is None else initial.float()
    rates = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(-1)
    return mean_pass(query, key, value, key, beta.unsqueeze(-1), rates, mean)


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Filter whole sequences; g is the log decay, [B,T,H] or [B,T,H,D]. Packed sequences are kept apart."""
    del chunk_size  # the native code's own is faster, and results do not depend on it
    bounds = boundaries(key.shape[1], options)
    q, k = _prepared(query, key, value.shape[2], use_qk_l2norm_in_kernel)
    tensors = (q, k, value.float(), g.float(), beta.float())
    output, state = each(bounds, _sequence, tensors, initial_state)
    return output.to(query.dtype), state if output_final_state else None


def recurrent_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Continue a cached state by a token, in the native decoding step; more tokens, or gradients, as in chunks."""
    if key.shape[1] == 1 and initial_state is not None:
        result = _step(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel)
        if result is not None:
            output, belief = result
            return output, belief.mean if output_final_state else None
    return chunk_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **options,
    )


def _step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalise: bool
) -> tuple[Tensor, Belief] | None:
    """Decode a token; None if native code declines. Few operations, since each costs as much as the step itself."""
    D = key.shape[-1]
    q, k = query[:, 0].float(), key[:, 0].float()
    square = 1.0  # of the length that keys have here for a length of one
    if normalise:  # RMS norms are √D times as long, which strengths and the output make up for
        q, k = F.rms_norm(torch.cat((q, k)), (D,), None, EPS / D).chunk(2)
        square = float(D)
    q, k = for_every_head(q, value.shape[2]), for_every_head(k, value.shape[2])
    log_decay, strength = g[:, 0].float(), beta[:, 0].float().unsqueeze(-1)
    if log_decay.ndim == 2:
        log_decay = log_decay.unsqueeze(-1)
    step = {
        "log_decay": log_decay.expand_as(k),
        "removal_key": log_decay.exp() * k,
        "removal": k * (strength / square),
        **NOISELESS,
    }
    written = value[:, 0].float() * (strength / square**0.5)
    with without_subnormals():
        result = native_step(DECODING, Belief(state.float()), q, k, written, step)
    if result is None:
        return None
    output, belief = result
    return output.mul_((D * square) ** -0.5).unsqueeze(1).to(query.dtype), belief


_RECURRENT = (
    *("query", "key", "value", "g", "beta"),
    *("initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
)
_CHUNK = (*_RECURRENT[:5], "chunk_size", *_RECURRENT[5:])

REPLACEMENTS = {
    "torch_chunk_gated_delta_rule": Replacement(_CHUNK, chunk_delta_rule),
    "torch_recurrent_gated_delta_rule": Replacement(_RECURRENT, recurrent_delta_rule),
    "chunk_kimi_delta_attention": Replacement(_CHUNK, chunk_delta_rule),
    "recurrent_kimi_delta_attention": Replacement(_RECURRENT, recurrent_delta_rule),
}
"""By the names of Transformers' functions."""
