r"""The generalised delta rule, chunk by chunk: each token is two writes of ops/mean_pass.py, one after the other.

    first   decay w_t,   key κ_t ⊘ w_t,   direction b_t,   value 0:      M' = diag(w_t) M_{t-1} − b_t (M_{t-1}ᵀ κ_t)ᵀ
    then    no decay,    key 0,           direction k_t,   value v_t:    M_t = M' + k_t v_tᵀ

So decays must stay away from 0, since 1/w is formed. RWKV-7 has w > e^{−e^{−1/2}} ≈ 0.545.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign.design import RowDrift
from membydesign.ops.mean_pass import Gains

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.ops.generalised_delta.naive import Steps
    from membydesign.ops.mean_pass import Means


def run(M: Tensor, x: Steps, size: int, means: Means) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,M] and the memory at the end, in chunks of `size` writes."""
    nothing = torch.zeros_like(x.q)
    log_decay = _in_turn(x.log_decay, nothing)
    key = _in_turn(x.removal_key * (-x.log_decay).exp(), nothing)
    gains = Gains(_in_turn(x.removal, x.k), x.q.new_ones(*log_decay.shape[:-1], 1))
    v = _in_turn(torch.zeros_like(x.v), x.v)
    found = means(RowDrift(log_decay), size, M, _in_turn(nothing, x.q), key, v, gains, return_error=False)
    return found.output[:, 1::2], found.mean


def _in_turn(first: Tensor, second: Tensor) -> Tensor:
    """[B,T,...] twice → [B,2T,...], the tokens of both in turn."""
    return torch.stack((first, second), 2).flatten(1, 2)
