"""The gains of a block-diagonal covariance in native code on a CPU: `csrc/block.c`, the same as design/block.py.

Forward saves the blocks before every `SPAN` tokens; backward computes those between anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import Block, DesignModel, Gains
from membydesign.filter.native import build as native
from membydesign.filter.native import mean_pass
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.torch import two_pass

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, SequenceDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, block-diagonal covariance", "native"
SOURCE = "block.c"
SPAN = 16
"""Tokens between two covariances that forward saves."""


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
        "n": x.rows_of_block,
        "R": x.log_decay.shape[-1],
        "rotates": x.angle is not None,
        "stationary": x.stationary,
        "C": SPAN,
    }


def _each_row(x: Any) -> tuple[int, ...]:
    return *x.write_noise.shape, x.k.shape[-1]


def _saved(x: Any) -> tuple[int, ...]:
    B, T, H, D = x.k.shape
    return B, H, x.write_noise.shape[-1], -(-T // SPAN), D * x.rows_of_block


# P̄k [B,T,H,G,D], precision [B,T,H,G] and read variances [B,T,H,G] of every token; `start` is [B,H,G,D/n,n,n]. Rows of a
# rotation are de-interleaved inside each block. log_decay is [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle.
OPERATOR = operator.differentiable(
    Description(
        "block",
        lambda _: SOURCE,
        inputs=(
            Input("k", "k"),
            Input("q", "q", optional=True),
            Input("process_noise", "l2"),
            Input("write_noise", "r2"),
            Input("log_decay", "log_a", values={"a": torch.exp}),
            Input("angle", "angle", values={"cos": torch.cos, "sin": torch.sin}, optional=True),
            Input("rows", "rows", constant=True),
            Input("start", "P"),
        ),
        options={"rows_of_block": int, "stationary": bool, "with_variance": bool},
        outputs=(
            Output("warped_key", "u", _each_row, saved="saved_u"),
            Output("precision", "b", "write_noise", saved="saved_b"),
            Output("variance", "variance", "write_noise", option="with_variance", null_gradient=True),
            Output("kept", "P", "start", start="start", symmetric=True),
            Output("blocks", "saved", _saved, option="save", saved="saved", private=True),
        ),
        numbers=_numbers,
    )
)


def gains(start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
    """The gains of all tokens; the arguments of `design.block.block_gains`."""
    assert drift.noise is not None
    size = start.shape[-1]
    rows, angle = drift.noise.rows.expand(k.shape[-1]), drift.rows.angle
    log_decay = drift.rows.log_decay if angle is None else drift.rows.of_pairs()
    if angle is not None:
        k, rows = _apart(k, size), _apart(rows, size)
        q = None if q is None else _apart(q, size)
        start = operator.apart(operator.apart(start, -1), -2)
    results = OPERATOR.apply(
        k=k,
        q=q,
        process_noise=drift.noise.variance,
        write_noise=drift.write_noise,
        log_decay=log_decay,
        angle=angle,
        rows=rows,
        start=start,
        rows_of_block=size,
        stationary=drift.noise.stationary,
        with_variance=q is not None,
    )
    warped_key, kept, precision = results["warped_key"], results["kept"], results["precision"]
    if angle is not None:
        warped_key = operator.together(warped_key.unflatten(-1, (-1, size)), -1).flatten(-2)
        kept = operator.together(operator.together(kept, -1), -2)
    return Gains(warped_key, precision, precision, kept, None if q is None else results["variance"])


def _apart(x: Tensor, size: int) -> Tensor:
    """Rows [..., D] with the pairs of each block de-interleaved."""
    return operator.apart(x.unflatten(-1, (-1, size)), -1).flatten(-2)


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    if not isinstance(design, DesignModel) or not isinstance(design.covariance, Block):
        return f"for {design.title}, since this kernel propagates a block-diagonal covariance"
    reason = mean_pass.why_not(design, request) or native.why_not(SOURCE, request.x.q)
    if reason is not None:
        return reason
    x = request.x
    if design.transition.row_noise(x.parameters, x.k) is None:
        return f"for {type(design.transition).__name__}, since its process noise is not independent in each row"
    drift = design.transition.row_drift(x.parameters, x.k)
    if drift is not None and drift.angle is not None and request.initial.covariance.shape[-1] % 2:
        return f"for {design.title}, since its drift turns pairs of rows and a block has an odd number of them"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in native code."""
    assert isinstance(design, DesignModel)
    size = mean_pass.chunk_size(request.x.q.shape[-1])
    return two_pass.run_with(design, request, mean_pass.mean_pass, size, gains)
