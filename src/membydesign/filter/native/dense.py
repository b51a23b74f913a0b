"""The dense filter in native code on a CPU: `csrc/kalman_token.c` for small D, `csrc/kalman_chunk.c` for large.

Forward saves the belief once every few tokens; backward recomputes each stretch between two saved beliefs and then
walks it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.belief import Belief, log_density_of_squares
from membydesign.filter.inputs import LONGEST_CHUNK, Run
from membydesign.filter.linear import dense_problem, why_not_dense
from membydesign.filter.native import build as native
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.torch.dense import SURE
from membydesign.filter.transforms import hidden, values

if TYPE_CHECKING:
    from membydesign.design import Design, RowDrift, RowNoise
    from membydesign.filter.inputs import Request
    from membydesign.filter.linear import DenseInputs

NAME, BACKEND = "native, dense covariance", "native"
CHECKS_STATE = True
TOKEN, CHUNK = "kalman_token.c", "kalman_chunk.c"


class Choice(NamedTuple):
    """How native code runs the dense filter.

    Attributes:
        size: how many tokens a chunk has; or, token by token, how many lie between two beliefs saved for backward.
        by_token: token by token, or chunk by chunk.
    """

    size: int
    by_token: bool = False


CHOICES = ((32, Choice(16, by_token=True)), (64, Choice(32)), (256, Choice(64)))
"""What is fastest on a CPU up to each D; beyond the last, as for it. `mbd bench --choices` measures it."""


def choice(D: int, chunk_size: int | None = None) -> Choice:
    """Return the fastest choice for a key size, or for the chunk size that a user wants (1: token by token)."""
    if chunk_size is not None and chunk_size > 1:
        return Choice(chunk_size)
    if chunk_size == 1:
        return Choice(16 if D <= 32 else 32 if D <= 64 else 64, by_token=True)
    return next((option for most, option in CHOICES if most >= D), CHOICES[-1][1])


def source(by_token: bool) -> str:
    """Return the C source of the filter, token by token or chunk by chunk."""
    return TOKEN if by_token else CHUNK


def available(dtype: torch.dtype, by_token: bool) -> bool:
    """Return whether the native filter is available for this type."""
    return native.available(source(by_token), dtype)


def _numbers(x: Any) -> dict[str, Any]:
    _, T, H, D = x.q.shape
    G = x.write_noise.shape[-1]
    return {
        "T": T,
        "H": H,
        "G": G,
        "D": D,
        "M": x.v.shape[-1] // G,
        "R": x.log_decay.shape[-1],
        "rotates": x.angle is not None,
        "C": x.size,
        "sure": float(SURE),
    }


def _boundaries(x: Any) -> int:
    """How many beliefs are saved: one before each stretch of `size` tokens, and one at the end."""
    return -(-x.q.shape[1] // x.size) + 1


def _saved_means(x: Any) -> tuple[int, ...]:
    B, H, G, D, m = x.mean.shape
    return B, H, G, _boundaries(x), D, m


def _saved_covariances(x: Any) -> tuple[int, ...]:
    B, H, G, D, _ = x.mean.shape
    return B, H, G, _boundaries(x), D, D


# For a rotation, rows of the belief are de-interleaved, and those of q and k if it goes by token. log_decay is
# [B,T,H,1] or [B,T,H,D], or [B,T,H,D/2] with an angle; mean is [B,H,G,D,M/G].
OPERATOR = operator.differentiable(
    Description(
        "kalman",
        lambda x: source(x.by_token),
        inputs=(
            Input("q", "q"),
            Input("k", "k"),
            Input("v", "v"),
            Input("process_noise", "l2"),
            Input("write_noise", "r2"),
            Input("log_decay", "log_a", values={"a": torch.exp}, on_request={"stationary": {"log_a": values}}),
            Input("angle", "angle", values={"cos": torch.cos, "sin": torch.sin}, optional=True),
            Input("rows", "rows", constant=True),
            Input("mean", "M"),
            Input("covariance", "P"),
        ),
        options={"size": int, "by_token": bool, "stationary": bool, "with_variance": bool, "with_squares": bool},
        outputs=(
            Output("output", "o", "v"),
            Output("mean", "M", "mean", start="mean"),
            Output("covariance", "P", "covariance", start="covariance", symmetric=True),
            Output("precision", "b", "write_noise", null_gradient=True),
            Output("squares", "squares", "write_noise", option="with_squares", null_gradient=True),
            Output("variance", "variance", "write_noise", option="with_variance", null_gradient=True),
            Output("means", "saved_M", _saved_means, option="save", saved="saved_M", private=True),
            Output("covariances", "saved_P", _saved_covariances, option="save", saved="saved_P", private=True),
        ),
        numbers=_numbers,
    )
)


def filter_native(
    drift: RowDrift,
    noise: RowNoise,
    initial: Belief,
    x: DenseInputs,
    size: int,
    *,
    by_token: bool,
    return_variance: bool,
    return_evidence: bool,
) -> Run:
    """`ObserveMemory` with `Dense`, over [B,T].

    `size` is how many tokens a chunk has, or how many lie between two saved beliefs if it goes `by_token`.
    """
    D, G = x.q.shape[-1], x.write_noise.shape[-1]
    mean = initial.mean.unflatten(-1, (G, -1)).movedim(-2, 2)
    q, k, covariance = x.q, x.k, initial.covariance
    rows, angle = noise.rows.expand(D), drift.angle
    log_decay = drift.log_decay if angle is None else drift.of_pairs()
    if angle is not None:
        rows = operator.apart(rows, -1)
        if by_token:
            q, k = operator.apart(q, -1), operator.apart(k, -1)
        mean, covariance = operator.apart(mean, -2), operator.apart(operator.apart(covariance, -1), -2)
    results = OPERATOR.apply(
        q=q,
        k=k,
        v=x.v,
        process_noise=noise.variance,
        write_noise=x.write_noise,
        log_decay=log_decay,
        angle=angle,
        rows=rows,
        mean=mean,
        covariance=covariance,
        size=size,
        by_token=by_token,
        stationary=noise.stationary,
        with_variance=return_variance,
        with_squares=return_evidence,
    )
    mean, covariance, precision = results["mean"], results["covariance"], results["precision"]
    if angle is not None:
        mean, covariance = operator.together(mean, -2), operator.together(operator.together(covariance, -1), -2)
    squares = results["squares"] if return_evidence else None
    return Run(
        results["output"],
        Belief(mean.movedim(2, -2).flatten(-2), covariance),
        precision,
        results["variance"].clamp_min(0) if return_variance else None,
        None if squares is None else log_density_of_squares(squares, precision, x.v.shape[-1]),
        squares,
    )


NOISE = 4096
"""How often larger than a write noise the process noise along a key may be for float32 to condition in chunks."""


def _noise_dominates(noise: RowNoise, x: DenseInputs) -> bool:
    """Whether a chunk would lose digits that a filter by token keeps: its process noise is summed up in float32."""
    if x.q.dtype != torch.float32 or hidden(x.q) or not noise.variance.numel():
        return False
    ratio = values(noise.variance).max() / values(x.write_noise).min()
    return ratio.item() > 16 and (ratio * values(x.k).square().sum(-1).max()).item() > NOISE


def passes_on(design: Design) -> bool:
    """What is not finite in q, k or v shows in the results."""
    del design
    return True


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    q = request.x.q
    return why_not_dense(design, request.x) or native.why_not(
        source(choice(q.shape[-1], request.chunk_size).by_token), q
    )


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in native code."""
    drift, noise, x = dense_problem(design, request.x)
    size, by_token = choice(x.q.shape[-1], request.chunk_size)
    if not by_token and _noise_dominates(noise, x) and native.why_not(source(True), x.q) is None:
        size, by_token = 16, True
    return filter_native(
        drift,
        noise,
        request.initial,
        x,
        min(size, LONGEST_CHUNK, x.q.shape[1]),
        by_token=by_token,
        return_variance=request.return_variance,
        return_evidence=request.return_evidence,
    )
