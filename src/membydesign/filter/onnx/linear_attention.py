r"""Delta rules and additive writes as one operator of ONNX Runtime, `LinearAttention` (domain com.microsoft).

| ours | its input or attribute |
|---|---|
| $M_t$, [B,H,D,M] | past_state, present_state |
| q, k, v, [B,T,H,·] | query, key, value with the heads side by side, [B,T,H·D]; scale = 1 |
| $\log a_t$, [B,T,H,1] or [B,T,H,D] | decay, [B,T,H] or [B,T,H·D] |
| $\eta_t = \lambda_t/(r_t^2 + \lambda_t \lVert k_t\rVert^2)$ | beta, [B,T,H] |
| $\omega_t v_t$ of an additive write | value: its additive rules have no weight |

It decays, corrects, writes and reads, in the order of our filters.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import DesignModel
from membydesign.filter.linear import why_not_two_pass
from membydesign.filter.torch import two_pass
from membydesign.filter.torch.mean_pass import MeanPass

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, Gains, RowDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "LinearAttention", "onnx"
DOMAIN = "com.microsoft"


def why_not(design: Design, request: Request) -> str | None:
    """Why the operator cannot filter the request, to follow `expected another operator`; None if it can."""
    reason = why_not_two_pass(design, request.x)
    if reason is not None:
        return reason
    assert isinstance(design, DesignModel)
    if design.keeps_covariance:
        return f"for {design.title}, since {NAME} keeps no covariance"
    if design.gain_groups(2) > 1:
        return f"for gains that differ between value columns, since {NAME} has one for all"
    drift = design.transition.row_drift(request.x.parameters, request.x.k)
    if drift is None or drift.angle is not None or drift.removal is not None:
        return f"for {type(design.transition).__name__}, since the memories of {NAME} only decay"
    if request.return_evidence:
        return f"with return_evidence=True, since {NAME} returns no errors of writes"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] with one operator."""
    assert isinstance(design, DesignModel)
    means = partial(_mean_pass, decays=bool(design.transition.step_parameters))
    return two_pass.run_with(design, request, means, 1)


def _mean_pass(
    drift: RowDrift,
    size: int,
    mean: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gains: Gains,
    *,
    return_error: bool,
    decays: bool,
) -> MeanPass:
    """Run the mean over all tokens; the arguments of `filter.torch.mean_pass.mean_pass`, and whether memory decays."""
    del size
    assert not return_error
    strength, additive = gains.strength[..., 0], k is None
    tokens = [q, gains.direction[..., 0, :], strength[..., None] * v if additive else v]
    decay = drift.log_decay.flatten(2) if decays else None
    rule = ("gated" if decays else "linear") if additive else ("gated_delta" if decays else "delta")
    attributes: dict[str, Any] = {
        "q_num_heads": q.shape[2],
        "kv_num_heads": q.shape[2],
        "update_rule": rule,
        "scale": 1.0,
    }
    output, end = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{NAME}",
        [*(x.flatten(2) for x in tokens), mean, decay, None if additive else strength],
        attributes,
        dtypes=(mean.dtype, mean.dtype),
        shapes=(v.flatten(2).shape, mean.shape),
        version=1,
    )
    return MeanPass(output.unflatten(-1, v.shape[2:]), None, end)
