"""Gains of a covariance that forgets in its own way, in native code on a CPU (`csrc/gains.c`), then the mean pass.

Forward saves the covariance once every `window` tokens; backward recomputes each window and then walks it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import DesignModel, ForgettingCovariance, Gains
from membydesign.filter.inputs import LONGEST_CHUNK
from membydesign.filter.native import build as native
from membydesign.filter.native import mean_pass
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.torch import two_pass
from membydesign.filter.torch.dense import SURE
from membydesign.filter.torch.forgetting import why_not_forgetting

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, Forgetting, SequenceDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, gains of a forgetting covariance, then chunks of the mean", "native"
CHECKS_STATE = True
SOURCE = "gains.c"

WINDOWS = ((128, 64), (None, 32))
"""Tokens between two covariances that forward saves, up to each D: backward has room for one at every token."""


def window(D: int, T: int) -> int:
    """How many tokens lie between two saved covariances."""
    return min(T, next(size for most, size in WINDOWS if most is None or most >= D))


def _numbers(x: Any) -> dict[str, Any]:
    _, T, H, D = x.k.shape
    return {
        "T": T,
        "H": H,
        "G": x.write_noise.shape[-1],
        "D": D,
        "R": x.log_decay.shape[-1],
        "rotates": x.angle is not None,
        "C": x.window,
        "piece": x.piece,
        "sure": float(SURE),
    }


def _each_row(x: Any) -> tuple[int, ...]:
    return *x.write_noise.shape, x.k.shape[-1]


def _boundaries(x: Any) -> tuple[int, ...]:
    B, H, G, D, _ = x.covariance.shape
    return B, H, G, -(-x.k.shape[1] // x.window) + 1, D, D


# For a rotation, rows of the covariance are de-interleaved. log_decay is [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an
# angle.
OPERATOR = operator.differentiable(
    Description(
        "gains",
        lambda _: SOURCE,
        inputs=(
            Input("k", "k"),
            Input("q", "q", optional=True),
            Input("write_noise", "r2"),
            Input("scale", "s"),
            Input("prior_variance", "lam", optional=True),
            Input("log_decay", "log_a", values={"a": torch.exp}),
            Input("angle", "angle", values={"cos": torch.cos, "sin": torch.sin}, optional=True),
            Input("covariance", "P"),
        ),
        options={"window": int, "piece": int, "with_variance": bool},
        outputs=(
            Output("covariance", "P", "covariance", start="covariance", symmetric=True),
            Output("warped_key", "u", _each_row),
            Output("precision", "b", "write_noise", null_gradient=True),
            Output("variance", "variance", "write_noise", option="with_variance", null_gradient=True),
            Output("covariances", "saved", _boundaries, option="save", saved="saved", private=True),
        ),
        numbers=_numbers,
    )
)


def gains(
    start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None, forgetting: Forgetting, piece: int
) -> Gains:
    """The gains of all tokens, `piece` at once at most; the arguments of `filter.torch.forgetting.gains`."""
    angle = drift.rows.angle
    log_decay = drift.rows.log_decay if angle is None else drift.rows.of_pairs()
    covariance = start if angle is None else operator.apart(operator.apart(start, -1), -2)
    results = OPERATOR.apply(
        k=k,
        q=q,
        write_noise=drift.write_noise,
        scale=forgetting.scale,
        prior_variance=forgetting.prior_variance,
        log_decay=log_decay,
        angle=angle,
        covariance=covariance,
        window=window(k.shape[-1], k.shape[1]),
        piece=piece,
        with_variance=q is not None,
    )
    covariance, precision = results["covariance"], results["precision"]
    if angle is not None:
        covariance = operator.together(operator.together(covariance, -1), -2)
    variance = None if q is None else results["variance"].clamp_min(0)
    return Gains(results["warped_key"], precision, precision, covariance, variance)


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    return (
        why_not_forgetting(design, request) or mean_pass.why_not(design, request) or native.why_not(SOURCE, request.x.q)
    )


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in native code."""
    assert isinstance(design, DesignModel)
    covariance = design.covariance
    assert isinstance(covariance, ForgettingCovariance)

    piece = min(request.chunk_size or LONGEST_CHUNK, LONGEST_CHUNK)

    def gains_of(start: Tensor, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        return gains(start, k, drift, q, covariance.forgetting(drift.parameters), piece)

    size = mean_pass.chunk_size(request.x.q.shape[-1])
    return two_pass.run_with(design, request, mean_pass.mean_pass, size, gains_of)
