"""The gains of the diagonal covariance in native code on a CPU: `csrc/diagonal.c`, the same as design/diagonal.py.

Forward keeps the variances after every token; backward walks them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import DesignModel, Diagonal
from membydesign.design.diagonal import DiagonalGains
from membydesign.filter.native import build as native
from membydesign.filter.native import mean_pass
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.torch import two_pass
from membydesign.filter.transforms import values

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, Gains, SequenceDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, diagonal covariance", "native"
SOURCE = "diagonal.c"


def available(dtype: torch.dtype) -> bool:
    """Return whether the native gains are available for this type."""
    return native.available(SOURCE, dtype)


def _numbers(x: Any) -> dict[str, Any]:
    _, T, H, D = x.k.shape
    return {
        "T": T,
        "H": H,
        "G": x.write_noise.shape[-1],
        "D": D,
        "R": x.log_decay.shape[-1],
        "rotates": x.angle is not None,
    }


def _each_row(x: Any) -> tuple[int, ...]:
    return *x.write_noise.shape, x.k.shape[-1]


# P̄k [B,T,H,G,D], precision [B,T,H,G] and variances [B,T,H,G,D] of every token; `start` is [B,H,G,D]. Rows of a rotation
# are de-interleaved. log_decay is [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle.
OPERATOR = operator.differentiable(
    Description(
        "diagonal",
        lambda _: SOURCE,
        inputs=(
            Input("k", "k"),
            Input("process_noise", "l2"),
            Input("write_noise", "r2"),
            Input(
                "log_decay",
                "log_a",
                values={"a2": lambda log_decay: (2 * log_decay).exp()},
                on_request={"stationary": {"log_a": values}},
            ),
            Input("angle", "angle", values={"cos": torch.cos, "sin": torch.sin}, optional=True),
            Input("rows", "rows", constant=True),
            Input("start", "start"),
        ),
        options={"stationary": bool},
        outputs=(
            Output("warped_key", "u", _each_row),
            Output("precision", "b", "write_noise", saved="saved_b"),
            Output("variances", "p", _each_row, saved="saved_p"),
        ),
        numbers=_numbers,
    )
)


def gains(start: Tensor, k: Tensor, drift: SequenceDrift) -> DiagonalGains:
    """The gains of all tokens; the arguments of `design.diagonal.diagonal_gains`."""
    assert drift.noise is not None
    rows, angle = drift.noise.rows.expand(k.shape[-1]), drift.rows.angle
    log_decay = drift.rows.log_decay if angle is None else drift.rows.of_pairs()
    if angle is not None:
        k, rows, start = (operator.apart(t, -1) for t in (k, rows, start))
    results = OPERATOR.apply(
        k=k,
        process_noise=drift.noise.variance,
        write_noise=drift.write_noise,
        log_decay=log_decay,
        angle=angle,
        rows=rows,
        start=start,
        stationary=drift.noise.stationary,
    )
    warped_key, variances = results["warped_key"], results["variances"]
    if angle is not None:
        warped_key, variances = operator.together(warped_key, -1), operator.together(variances, -1)
    return DiagonalGains(warped_key, results["precision"], variances)


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    if not isinstance(design, DesignModel) or not isinstance(design.covariance, Diagonal):
        return f"for {design.title}, since this kernel propagates a diagonal covariance"
    reason = mean_pass.why_not(design, request) or native.why_not(SOURCE, request.x.q)
    if reason is None and design.transition.row_noise(request.x.parameters, request.x.k) is None:
        return f"for {type(design.transition).__name__}, since its process noise is not independent in each row"
    return reason


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in native code."""
    assert isinstance(design, DesignModel)
    size = mean_pass.chunk_size(request.x.q.shape[-1])

    def gains_of(start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        return gains(start, k, drift).with_reads(q)

    return two_pass.run_with(design, request, mean_pass.mean_pass, size, gains_of)
