"""What the kernels of linear-Gaussian designs need to know, as the parts of a `DesignModel` answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from membydesign.design import Covariance, Dense, DesignModel, Drift, LatentInput, RowDrift, RowNoise, SequenceDrift
from membydesign.state import map_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Inputs, Request


class DenseInputs(NamedTuple):
    """The inputs of the kernels for a dense covariance; a single step has no axis T.

    Attributes:
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        write_noise: r², [B,T,H,G].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    write_noise: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> DenseInputs:
        """The same inputs with f applied to each."""
        return map_state(f, self)


class DenseProblem(NamedTuple):
    """A design with a dense covariance, as its kernels see it: drift and process noise of rows, inputs."""

    drift: RowDrift
    noise: RowNoise
    x: DenseInputs


def dense_problem(design: Design, x: Inputs) -> DenseProblem:
    """Of a design and inputs for which `why_not_dense` has no objection."""
    assert isinstance(design, DesignModel)
    drift = design.transition.row_drift(x.parameters, x.k)
    noise = design.transition.row_noise(x.parameters, x.k)
    write_noise = design.write.noise(x.parameters)
    assert drift is not None
    assert noise is not None
    assert write_noise is not None
    return DenseProblem(drift, noise, DenseInputs(x.q, x.k, x.v, write_noise))


def why_not_linear(design: Design, x: Inputs) -> str | None:
    """Why no chunked kernel can filter this at all, to follow `expected another backend`; None if one may."""
    if not isinstance(design, DesignModel):
        return f"for {design.title}, since chunked kernels run linear-Gaussian designs (DesignModel)"
    if design.transition.row_drift(x.parameters, x.k) is None:
        name = type(design.transition).__name__
        return f"for {name}, since chunked kernels run drifts of rows, and {name}.row_drift returns none"
    if design.write.noise(x.parameters) is None:
        name = type(design.write).__name__
        return f"for {name}, since chunked kernels need the noise of writes in advance, and {name}.noise returns none"
    return None


def why_not_dense(design: Design, x: Inputs) -> str | None:
    """Why the kernels for a dense covariance cannot filter this; None if they can."""
    reason = why_not_linear(design, x)
    if reason is not None:
        return reason
    assert isinstance(design, DesignModel)
    if not design.write.observes_memory or not isinstance(design.covariance, Dense):
        return f"for {design.title}, since this kernel propagates a dense covariance"
    drift = design.transition.row_drift(x.parameters, x.k)
    if drift is not None and drift.removal is not None:
        return f"for {type(design.transition).__name__}, since this kernel's drifts of rows remove nothing"
    if design.transition.row_noise(x.parameters, x.k) is None:
        return f"for {type(design.transition).__name__}, since its process noise is not independent in each row"
    return None


def why_not_two_pass(design: Design, x: Inputs) -> str | None:
    """Why the mean cannot be passed over chunks once gains are known; None if it can."""
    reason = why_not_linear(design, x)
    if reason is not None:
        return reason
    assert isinstance(design, DesignModel)
    drift = design.transition.row_drift(x.parameters, x.k)
    removes = drift is not None and drift.removal is not None
    if not design.write.observes_memory:
        if not isinstance(design.write, LatentInput):
            return f"for {type(design.write).__name__}, since the chunks of additive writes are those of LatentInput"
        kept = design.keeps_covariance
        if kept and (removes or not isinstance(design.covariance, Dense)):
            return f"for {design.title}, since additive writes run in chunks with MeanOnly(), or Dense() and no removal"
        return None
    if removes:
        return f"for {type(design.transition).__name__}, since a removal runs in chunks with additive writes only"
    if type(design.covariance).gains is Covariance.gains or isinstance(design.covariance, Dense):
        return f"for {design.title}, since {type(design.covariance).__name__} has no gains for whole sequences"
    return None


def sequence_drift(design: DesignModel, request: Request) -> SequenceDrift:
    """How memory drifts over a whole sequence."""
    x = request.x
    rows, write_noise = design.transition.row_drift(x.parameters, x.k), design.write.noise(x.parameters)
    noise = design.transition.row_noise(x.parameters, x.k) if design.has_process_noise else None
    assert rows is not None
    assert write_noise is not None

    def steps(t: int) -> Drift:
        return design.drifted(request.initial[0], x.step(t))

    return SequenceDrift(rows, noise, write_noise, x.parameters, steps)
