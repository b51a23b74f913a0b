"""The specification of every fast path: a loop over tokens that takes one `step` at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops.additive import naive as additive
from membydesign.ops.delta import naive as delta
from membydesign.ops.kalman import naive as kalman

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs

RULES = {"kalman": kalman, "delta": delta, "additive": additive}


class Run(NamedTuple):
    """What a filter over [B,T] found.

    Attributes:
        output: $M_t^\\top q_t$, [B,T,H,M].
        belief: the belief after the last token.
        precision: $\\beta_t$, [B,T,H,G].
        variance: $q_t^\\top P_t q_t$, [B,T,H,G], or None.
        write_log_evidence: $\\log p(v_t \\mid v_{<t})$, [B,T,H], or None.
    """

    output: Tensor
    belief: Belief
    precision: Tensor
    variance: Tensor | None
    write_log_evidence: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> Run:
        """The same run with f applied to all that it found."""
        return Run._make(x.map(f) if isinstance(x, Belief) else None if x is None else f(x) for x in self)


def filter_recurrent(
    design: DesignModel, initial: Belief, inputs: Inputs, *, return_variance: bool, return_evidence: bool
) -> Run:
    """Predict, write, read; token by token."""
    rule = RULES[design.rule]
    belief = initial
    outputs, precisions, variances, evidences = [], [], [], []
    for t in range(inputs.q.shape[1]):
        x = inputs.at(t)
        belief, write = rule.step(design, belief, x)
        outputs.append(belief.read(x.q))
        precisions.append(write.precision)
        if return_variance:
            variances.append(
                delta.read_variance(write.precision, x) if belief.covariance is None else belief.variance(x.q)
            )
        if return_evidence:
            evidences.append(gaussian_log_density(write.error, write.precision))
    return Run(
        torch.stack(outputs, 1),
        belief,
        torch.stack(precisions, 1),
        torch.stack(variances, 1) if return_variance else None,
        torch.stack(evidences, 1) if return_evidence else None,
    )
