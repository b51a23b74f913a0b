"""The gains of a low-rank covariance in native code on a CPU: `csrc/low_rank.c`, the same as design/low_rank.py.

Forward saves the rows W before every `SPAN` tokens, and how each token shortened them; backward computes those between
anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.belief import Resolved
from membydesign.design import DesignModel, Gains, LowRank
from membydesign.filter.native import build as native
from membydesign.filter.native import mean_pass
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.torch import two_pass

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, SequenceDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, low-rank covariance", "native"
SOURCE = "low_rank.c"
SPAN = 16
"""Tokens between two W that forward saves."""


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
        "R": x.rank,
        "decays": x.log_decay.shape[-1],
        "rotates": x.angle is not None,
        "C": SPAN,
    }


def _each_row(x: Any) -> tuple[int, ...]:
    return *x.write_noise.shape, x.k.shape[-1]


def _saved(x: Any) -> tuple[int, ...]:
    B, T, H, D = x.k.shape
    return B, H, x.write_noise.shape[-1], -(-T // SPAN), x.rank * D


def _turns(x: Any) -> tuple[int, ...]:
    return *x.write_noise.shape, 2 + (x.rank + 1) * (x.rank + 2)


# For a prior of 1: P̄k [B,T,H,G,D], precision [B,T,H,G] and read variances [B,T,H,G] of every token; `start` is W,
# [B,H,G,R,D]. Rows of a rotation are de-interleaved. log_decay is [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle.
OPERATOR = operator.differentiable(
    Description(
        "low_rank",
        lambda _: SOURCE,
        inputs=(
            Input("k", "k"),
            Input("q", "x", optional=True),
            Input("write_noise", "r2"),
            Input("log_decay", "log_a", values={"a": torch.exp}),
            Input("angle", "angle", values={"cos": torch.cos, "sin": torch.sin}, optional=True),
            Input("start", "W"),
        ),
        options={"rank": int, "with_variance": bool},
        outputs=(
            Output("warped_key", "u", _each_row, saved="saved_u"),
            Output("precision", "b", "write_noise", saved="saved_b"),
            Output("variance", "variance", "write_noise", option="with_variance", null_gradient=True),
            Output("kept", "W", "start", start="start"),
            Output("rows", "saved", _saved, option="save", saved="saved", private=True),
            Output("turns", "turns", _turns, option="save", saved="turns", private=True),
        ),
        numbers=_numbers,
    )
)


def gains(start: Resolved, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
    """The gains of all tokens; the arguments of `LowRank.gains`."""
    rows, prior = start
    angle, each_token = drift.rows.angle, prior[:, None]
    log_decay = drift.rows.log_decay if angle is None else drift.rows.of_pairs()
    if angle is not None:
        k, rows = operator.apart(k, -1), operator.apart(rows, -1)
        q = None if q is None else operator.apart(q, -1)
    results = OPERATOR.apply(
        k=k,
        q=q,
        write_noise=drift.write_noise / each_token,
        log_decay=log_decay,
        angle=angle,
        start=rows,
        rank=rows.shape[-2],
        with_variance=q is not None,
    )
    direction, kept, strength = results["warped_key"], results["kept"], results["precision"]
    if angle is not None:
        direction, kept = operator.together(direction, -1), operator.together(kept, -1)
    variance = None if q is None else each_token * results["variance"]
    return Gains(direction, strength, strength / each_token, Resolved(kept, prior), variance)


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    if not isinstance(design, DesignModel) or not isinstance(design.covariance, LowRank):
        return f"for {design.title}, since this kernel propagates a low-rank covariance"
    return mean_pass.why_not(design, request) or native.why_not(SOURCE, request.x.q)


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in native code."""
    assert isinstance(design, DesignModel)
    size = mean_pass.chunk_size(request.x.q.shape[-1])
    return two_pass.run_with(design, request, mean_pass.mean_pass, size, gains)
