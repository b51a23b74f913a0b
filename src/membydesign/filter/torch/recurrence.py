r"""Linear recurrences on the chunked mean pass: every `LinearRecurrence`, such as DeltaProduct and mLSTM.

Decays, directions, keys and values are known before anything is filtered, so all that is left is the mean pass. A token
with n writes becomes n tokens of it: the first carries the decay, the last the query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign import design as designs
from membydesign.design import Gains, RowDrift
from membydesign.filter.inputs import LONGEST_CHUNK, Run
from membydesign.filter.torch.mean_pass import mean_pass

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design, LinearRecurrence
    from membydesign.filter.inputs import Request
    from membydesign.filter.torch.mean_pass import Means

NAME, BACKEND = "torch, linear recurrence in chunks", "torch"


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    del request
    if not isinstance(design, designs.LinearRecurrence):
        return f"for {design.title}, since this kernel runs a LinearRecurrence"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in torch."""
    assert isinstance(design, designs.LinearRecurrence)
    return run_with(design, request, mean_pass, 64)


def run_with(design: LinearRecurrence, request: Request, means: Means, size: int) -> Run:
    """Filter [B,T] with any implementation of the mean pass.

    Args:
        design: the assumptions.
        request: what to compute.
        means: the mean pass.
        size: writes in a chunk, unless the user names a number of tokens.
    """
    x, T = request.x, request.x.q.shape[1]

    def accumulate(start: Tensor, log_decay: Tensor, added: Tensor) -> Tensor:
        """Fading sums: a memory with one row, whose key is always 1."""
        one = added.new_ones(()).expand(*added.shape[:-1], 1)
        gains = Gains(one[..., None, :], one, one, None)
        drift, tokens = RowDrift(log_decay[..., None]), request.tokens_in_chunk(size)
        return means(drift, tokens, start[:, :, None], one, None, added, gains, return_error=False).output

    recurrence = design.recurrence(request.initial, x.k, x.v, x.parameters, accumulate)
    log_decay, direction, value, key, _, _ = recurrence
    n = direction.shape[-2]
    writes = n * request.chunk_size if request.chunk_size else size
    one = value.new_ones(()).expand(value.shape[0], n * T, value.shape[2], 1)
    result = means(
        RowDrift(_at(log_decay, 0, n)),
        min(writes, LONGEST_CHUNK, n * T),
        design.matrix(request.initial),
        _at(x.q, n - 1, n),
        None if key is None else _in_turn(key),
        _in_turn(value),
        Gains(_in_turn(direction)[..., None, :], one, one, None),
        return_error=request.return_evidence and key is not None,
    )
    evidence = None
    if request.return_evidence:
        error = None if result.error is None else result.error.unflatten(1, (T, n)).movedim(2, -2)
        evidence = design.log_densities(x.v, error, recurrence)
    output = design.outputs(result.output[:, n - 1 :: n], recurrence)
    return Run(output, design.state_of(result.mean, recurrence.kept), write_log_evidence=evidence)


def _in_turn(x: Tensor) -> Tensor:
    """[B,T,H,n,·] → [B,T·n,H,·]."""
    return x.movedim(-2, 2).flatten(1, 2)


def _at(x: Tensor, j: int, n: int) -> Tensor:
    """[B,T,H,·] → [B,T·n,H,·], with zeros for all but the j-th of the n writes of a token."""
    if n == 1:
        return x
    parts = [torch.zeros_like(x)] * n
    parts[j] = x
    return torch.stack(parts, 2).flatten(1, 2)
