"""Functions with the names, arguments and conventions of flash-linear-attention 0.6, as loops written from its docs.

They let the way to its kernels be tested where there is no GPU. tests/filter/test_fla.py compares them with that
library's own references, and their arguments with its real functions, where it is installed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def _run(q, k, v, decay, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu):
    """S ← a S;  S ← S + β k (v − Sᵀk)ᵀ, or S + k vᵀ without β;  o = scale · Sᵀ q. In float32, as in the kernels."""
    B, T, H, K = q.shape
    bounds = [0, T]
    if cu_seqlens is not None:
        assert B == 1
        assert cu_seqlens.dtype in (torch.int32, torch.int64)
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        bounds = cu_seqlens.tolist()
        assert all(start < end for start, end in pairwise(bounds)), "a sequence without a token"
    N = B if cu_seqlens is None else len(bounds) - 1
    shape = (N, H, K, v.shape[-1])
    if initial_state is None:
        initial_state = torch.zeros(shape)
    assert initial_state.dtype == torch.float32, "initial_state must be in float32."
    assert initial_state.shape == shape
    dtype, scale = q.dtype, K**-0.5 if scale is None else scale
    q, k, v = q.float() * scale, k.float(), v.float()
    outputs, ends = [], []
    for n in range(len(bounds) - 1):
        S = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for t in range(bounds[n], bounds[n + 1]):
            if decay is not None:
                S = decay[:, t].float().exp() * S
            key, value = k[:, t, :, :, None], v[:, t, :, None, :]
            if beta is not None:
                value = beta[:, t, :, None, None].float() * (value - (key * S).sum(-2, keepdim=True))
            S = S + key * value
            outputs.append((q[:, t, :, :, None] * S).sum(-2))
        ends.append(S)
    return torch.stack(outputs, 1).to(dtype), torch.cat(ends) if output_final_state else None


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs,
):
    assert g_gamma is None
    assert not state_v_first
    assert not kwargs
    assert g is None or g.shape == q.shape[:3]
    decay = None if g is None else g[..., None, None]
    return _run(q, k, v, decay, None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
):
    assert not state_v_first
    assert q.shape == k.shape == g.shape, "q, k, g must have the same shape."
    return _run(q, k, v, g[..., None], None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs,
):
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype != torch.float32, "ChunkDeltaRuleFunction does not support float32. Please use bfloat16."
    assert not use_qk_l2norm_in_kernel
    assert not kwargs
    assert beta.shape == q.shape[:3]
    return _run(q, k, v, None, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs,
):
    assert not any((use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, kwargs))
    assert g.shape == beta.shape == q.shape[:3]
    decay = g[..., None, None]
    return _run(q, k, v, decay, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs,
):
    assert not any((use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval))
    assert not any((safe_gate, lower_bound, disable_recompute, return_intermediate_states, state_v_first, kwargs))
    assert g.shape == q.shape, "g must have shape [B, T, HV, K]"
    assert beta.shape == q.shape[:3]
    return _run(q, k, v, g[..., None], beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


STAND_INS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (chunk_simple_gla, chunk_gla, chunk_delta_rule, chunk_gated_delta_rule, chunk_kda)
}
