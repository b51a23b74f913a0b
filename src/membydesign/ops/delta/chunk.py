r"""The delta rule, chunk by chunk: gains are known in advance, so only the mean has to be passed along.

d_t = k_t,   γ_t = η_t = λ_t / (r_t² + λ_t ‖k_t‖²)          then ops/mean_pass.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.belief import Belief, gaussian_log_density
from membydesign.ops.delta.naive import read_variance
from membydesign.ops.mean_pass import Gains
from membydesign.ops.recurrent import Run

if TYPE_CHECKING:
    from membydesign.design import RowDrift
    from membydesign.ops.inputs import Inputs
    from membydesign.ops.mean_pass import Means


def filter_chunk(
    drift: RowDrift,
    initial: Belief,
    x: Inputs,
    size: int,
    means: Means,
    *,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`ObserveMemory` with `Reset` or `PerColumnReset`, over [B,T]."""
    assert x.prior_variance is not None
    precision = 1 / (x.write_noise + x.prior_variance * x.k.square().sum(-1, keepdim=True))
    gains = Gains(x.k, precision * x.prior_variance)
    found = means(drift, size, initial.mean, x.q, x.k, x.v, gains, return_error=return_evidence)
    return Run(
        found.output,
        Belief(found.mean),
        precision,
        read_variance(precision, x) if return_variance else None,
        None if found.error is None else gaussian_log_density(found.error, precision),
    )
