"""Checks of results: whether a filter broke down, and whether the next call would accept the state it returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from membydesign.errors import FilterError, NonFiniteError, NotPositiveDefiniteError
from membydesign.filter.checks import all_finite, of_sample, where_at
from membydesign.filter.transforms import hidden, values
from membydesign.state import map_state, named_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design import Design


def precision_bound(dtype: torch.dtype) -> float:
    """The largest β r², rounded: 1/β is r² + kᵀP̄k."""
    return 1 + math.sqrt(torch.finfo(dtype).eps)


def check_results(precision: Tensor | None, noise: Tensor | None, results: Mapping[str, Tensor | None]) -> None:
    r"""Raise if a filter broke down: an innovation variance out of bounds, or a result that overflowed.

    Args:
        precision: β of every step, [B,T,H,G], of a design that has one.
        noise: r² of every write, [B,T,H,G], which 1/β cannot fall below; None if unknown.
        results: everything it computed, by name.
    """
    if any(hidden(x) for x in results.values() if x is not None):
        return
    if precision is not None:
        noise = torch.zeros_like(precision) if noise is None else noise
        _check_precision(precision.detach(), noise.detach())
    for name, x in results.items():
        if x is not None and not all_finite(x):
            index = (~torch.isfinite(values(x))).nonzero()[0].tolist()
            hint = "scale the inputs down or use a wider type"
            raise NonFiniteError(f"{name} overflowed in {x.dtype} at index {index}: {hint}")


LOST = -1.0
"""The precision that a kernel returns where it found a covariance that is not positive definite."""


def was_sure(precision: Tensor | None, noise: Tensor | None) -> bool:
    """Whether a write more than halved the variance along its key, so that errors may now be large compared with it."""
    if precision is None or noise is None or hidden(precision):
        return False
    return bool(values(precision * noise).min() < 0.5)


def check_final_state(design: Design, state: Any, q: Tensor, *, thorough: bool) -> None:
    """Raise if the next call would refuse the state that a filter over q, [B,T,H,D], has arrived at."""
    if hidden(q):
        return
    for flaw in design.state_flaws(map_state(values, state), thorough=thorough):
        if bool(flaw.where.any()):
            index = flaw.where.nonzero()[0].tolist()
            _, part = next(named_tensors(state))
            mapped = min(values(part).ndim - part.ndim, len(index))
            axes = [f"{axis} {i}" for axis, i in zip(("batch", "head", "group", "row"), index[mapped:], strict=False)]
            axes.insert(1, f"position {q.shape[1] - 1}")
            where = ", ".join(axes) + of_sample(index[:mapped])
            if not issubclass(flaw.error, NotPositiveDefiniteError):
                raise FilterError(f"the {flaw.part} broke down in {q.dtype} at {where}: expected {flaw.expected}")
            raise NotPositiveDefiniteError(
                f"the {flaw.part} stopped being positive definite in {q.dtype} at {where}: expected {flaw.expected}. "
                f"{_REMEDY}"
            )


_REMEDY = "Filter in float64, raise write_noise, or give process_noise > 0."


def _check_precision(precision: Tensor, noise: Tensor) -> None:
    """Raise if a β is not positive or, beyond rounding, above 1/r²: 1/β is r² + kᵀP̄k.

    One reduction decides whether to locate the offending entry.
    """
    bound = precision_bound(precision.dtype)
    every, ratio = values(precision), values(precision * noise)
    smallest, largest = (value.item() for value in torch.aminmax(every))
    if smallest > 0 and math.isfinite(largest) and ratio.max().item() <= bound:
        return
    noise = values(noise * torch.ones_like(precision))
    carried = torch.isfinite(every) & (every != 0)
    bad = ~(carried & (ratio <= bound) & (every > 0))
    if bool(bad.any()):
        index = min(bad.nonzero().tolist(), key=lambda i: i[-3])  # the earliest position
        where, at = where_at(index, precision, last="group"), tuple(index)
        if not bool(carried[at]):
            raise NonFiniteError(
                f"the innovation precision overflowed in {precision.dtype} at {where}: it is {every[at].item()}. "
                "Scale keys or variances, or use float64."
            )
        reason = f"innovation variance {1 / every[at].item():.3g} is below its write noise {noise[at].item():.3g}"
        if every[at].item() == LOST:
            reason = "it has a negative eigenvalue"
        raise NotPositiveDefiniteError(
            f"the covariance stopped being positive definite in {precision.dtype} at {where}: {reason}. {_REMEDY}"
        )
