"""The one place that chooses how a design is filtered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design import Dense, Diagonal, PerColumnReset, Transition
from membydesign.ops.additive import chunk as additive
from membydesign.ops.delta import chunk as delta
from membydesign.ops.kalman import chunk as kalman
from membydesign.ops.kalman import cpu, diagonal
from membydesign.ops.recurrent import RULES, Run, filter_recurrent

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.belief import Belief
    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs


NATIVE_UP_TO = 128
"""The largest D for which a CPU filters token by token in native code: beyond, P and M of a head leave its cache."""


def run_filter(
    design: DesignModel,
    initial: Belief,
    inputs: Inputs,
    *,
    method: str,
    backend: str,
    chunk_size: int | None,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """Filter [B,T] by the given method; a drift that is no decay or rotation of rows always goes token by token."""
    wanted = {"return_variance": return_variance, "return_evidence": return_evidence}
    drift = design.transition.per_row(inputs.log_decay, inputs.angle, inputs.k)
    if method == "recurrent" or drift is None:
        return filter_recurrent(design, initial, inputs, **wanted)
    size = min(chunk_size or _chunk_size(design), inputs.q.shape[1])
    if design.rule == "delta":
        return delta.filter_chunk(drift, initial, inputs, size, **wanted)
    if design.rule == "additive":
        return additive.filter_chunk(drift, initial, inputs, size, **wanted)
    everywhere = type(design.transition).noise_rows is Transition.noise_rows
    rows = initial.mean.new_ones(1) if everywhere else design.transition.noise_rows(initial.mean)
    if isinstance(design.covariance, Diagonal):
        return diagonal.filter_chunk(drift, rows, initial, inputs, size, **wanted)
    if _native(backend, inputs):
        return cpu.filter_native(drift, rows, initial, inputs, **wanted)
    return kalman.filter_chunk(drift, rows, initial, inputs, size, **wanted)


def run_step(design: DesignModel, belief: Belief, inputs: Inputs) -> tuple[Tensor, Belief, Tensor]:
    """One token, [B,1]: the read-out [B,H,M], the new belief, and the precision of the write [B,1,H,G]."""
    if design.rule == "kalman" and isinstance(design.covariance, Dense) and _native("cpu", inputs):
        way = {"method": "chunk", "backend": "cpu", "chunk_size": None}
        run = run_filter(design, belief, inputs, **way, return_variance=False, return_evidence=False)
        return run.output[:, 0], run.belief, run.precision
    x = inputs.at(0)
    belief, write = RULES[design.rule].step(design, belief, x)
    return belief.read(x.q), belief, write.precision.unsqueeze(1)


def _native(backend: str, inputs: Inputs) -> bool:
    """Whether the dense filter runs in native code: if asked to, or by default where it is faster than products."""
    if backend == "torch" or inputs.q.device.type != "cpu":
        return False
    return (backend == "cpu" or inputs.q.shape[-1] <= NATIVE_UP_TO) and cpu.available(inputs.q.dtype)


def _chunk_size(design: DesignModel) -> int:
    """C where the user names none: smaller where every value column has a triangular system of its own."""
    return 16 if isinstance(design.covariance, PerColumnReset) else 64
