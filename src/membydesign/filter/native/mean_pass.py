"""The mean given gains, in native code on a CPU: `csrc/mean_pass.c`, the same as torch/mean_pass.py.

Forward goes token by token, except for rotations, and backward for small D; both save or use the mean at every chunk's
start, and backward recomputes the inside of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import DesignModel
from membydesign.filter.native import build as native
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.native.norms import squared_norms
from membydesign.filter.torch import two_pass
from membydesign.filter.torch.mean_pass import MeanPass

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, Gains, RowDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, gains then chunks of the mean", "native"
SOURCE = "mean_pass.c"


BY_GROUP = 128
"""The smallest D at which forward is faster with a few tokens in each pass over the mean."""
BACK_BY_TOKEN = 32
"""The largest D at which backward too is faster token by token than chunk by chunk."""


def available(dtype: torch.dtype) -> bool:
    """Return whether the native pass is available for this type."""
    return native.available(SOURCE, dtype)


def _numbers(x: Any) -> dict[str, Any]:
    _, T, H, D = x.q.shape
    return {
        "T": T,
        "H": H,
        "S": x.strength.shape[-1],
        "D": D,
        "M": x.v.shape[-1],
        "R": x.log_decay.shape[-1],
        "rotates": x.angle is not None,
        "C": x.size,
        "by_token": x.by_token,
        "back_by_token": x.by_token and x.q.shape[-1] <= BACK_BY_TOKEN,
        "by_group": x.by_token and x.q.shape[-1] >= BY_GROUP,
    }


def _boundaries(x: Any) -> tuple[int, ...]:
    B, H, D, M = x.mean.shape
    return B, H, -(-x.q.shape[1] // x.size) + 1, D, M


# Rows of the mean are de-interleaved for a rotation. log_decay is [B,T,H,1] or [B,T,H,D]; [B,T,H,D/2] with an angle.
OPERATOR = operator.differentiable(
    Description(
        "mean_pass",
        lambda _: SOURCE,
        inputs=(
            Input("q", "q"),
            Input("k", "k", optional=True),
            Input("v", "v"),
            Input("direction", "d"),
            Input("strength", "strength"),
            Input("log_decay", "log_a", values={"a": torch.exp}),
            Input("angle", "angle", values={"cos": torch.cos, "sin": torch.sin}, optional=True),
            Input("mean", "M"),
        ),
        options={"size": int, "by_token": bool, "with_error": bool},
        outputs=(
            Output("output", "o", "v"),
            Output("mean", "M", "mean", start="mean"),
            Output("error", "e", "v", option="with_error", null_gradient=True),
            Output("means", "saved", _boundaries, option="save", saved="saved", private=True),
        ),
        numbers=_numbers,
    )
)


def mean_pass(
    drift: RowDrift,
    size: int,
    mean: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gains: Gains,
    *,
    return_error: bool,
) -> MeanPass:
    """Run the mean over all chunks; the arguments of `filter.torch.mean_pass.mean_pass`."""
    direction, strength = gains.direction, gains.strength
    angle = drift.angle
    log_decay = drift.log_decay if angle is None else drift.of_pairs()
    groups = direction.shape[3] if direction.shape[3] > 1 else 0
    if groups:  # that write in directions of their own
        q, log_decay = _for_groups(q, groups), _for_groups(log_decay, groups)
        k = None if k is None else _for_groups(k, groups)
        angle = None if angle is None else _for_groups(angle, groups)
        direction, strength = direction.flatten(2, 3), strength.unsqueeze(-1).flatten(2, 3)
        v = v.unflatten(-1, (groups, -1)).flatten(2, 3)
        mean = mean.unflatten(-1, (groups, -1)).movedim(3, 2).flatten(1, 2)
    else:
        direction = direction[..., 0, :]
    if angle is not None:
        mean = operator.apart(mean, -2)
    results = OPERATOR.apply(
        q=q,
        k=k,
        v=v,
        direction=direction,
        strength=strength,
        log_decay=log_decay,
        angle=angle,
        mean=mean,
        size=size,
        by_token=angle is None,
        with_error=return_error,
    )
    output, error, end = results["output"], results["error"], results["mean"]
    if angle is not None:
        end = operator.together(end, -2)
    if groups:
        output = output.unflatten(2, (-1, groups)).flatten(-2)
        error = error.unflatten(2, (-1, groups)).flatten(-2) if return_error else error
        end = end.unflatten(1, (-1, groups)).movedim(2, 3).flatten(-2)
    return MeanPass(output, error if return_error else None, end)


def _for_groups(x: Tensor, groups: int) -> Tensor:
    """[B,T,H,·] → [B,T,H·G,·], the same for every group."""
    return x.unsqueeze(3).expand(*x.shape[:3], groups, x.shape[-1]).flatten(2, 3)


def passes_on(design: Design) -> bool:
    """Whether q, k and v that are not finite show in the results: a covariance might refuse them in its own words."""
    return isinstance(design, DesignModel) and not design.keeps_covariance


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    return two_pass.why_not(design, request) or native.why_not(SOURCE, request.x.q)


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in native code, with gains from the covariance."""
    assert isinstance(design, DesignModel)
    return two_pass.run_with(design, request, mean_pass, chunk_size(request.x.q.shape[-1]), norms=squared_norms)


def chunk_size(D: int) -> int:
    """The fastest chunk for a key size, measured by `mbd bench --choices`."""
    return 16 if D <= 16 else 32 if D <= 128 else 64
