"""Totals and shares of an `AdditiveDesign` in native code on a CPU: `csrc/totals.c`, the same as torch/additive.py.

One pass over the tokens that reads q and k and writes q/n. With only D totals per head, chunks would cost more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output
from membydesign.filter.torch.additive import Shares

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "totals.c"


def _numbers(x: Any) -> dict[str, Any]:
    _, T, H, D = x.q.shape
    return {"T": T, "H": H, "D": D, "resting": x.resting}


def _every_total(x: Any) -> tuple[int, ...]:
    B, T, H, D = x.q.shape
    return B, H, T + 1, D


# weight and log_decay are [B,T,H]; deviation is [B,H,D], n − n₀ at the start and at the end.
OPERATOR = operator.differentiable(
    Description(
        "totals",
        lambda _: SOURCE,
        inputs=(
            Input("q", "q", overwritten=True),
            Input("k", "k", overwritten=True),
            Input("weight", "w", overwritten=True),
            Input("log_decay", "log_a", values={"a": torch.exp}, overwritten=True),
            Input("deviation", "s"),
        ),
        options={"resting": float, "with_seen": bool},
        outputs=(
            Output("weights", "y", "q"),
            Output("sum", "sum", "weight"),
            Output("deviation", "s", "deviation", start="deviation"),
            Output("seen", "n", "q", option="with_seen", null_gradient=True),
            Output("deviations", "saved", _every_total, option="save", saved="saved", private=True),
        ),
        numbers=_numbers,
    )
)


def shares(
    start: Tensor, resting: float, q: Tensor, k: Tensor, weight: Tensor, log_decay: Tensor, *, return_seen: bool
) -> Shares:
    """Pass over the tokens; the arguments of `filter.torch.additive.shares_by`."""
    results = OPERATOR.apply(
        q=q,
        k=k,
        weight=weight,
        log_decay=log_decay,
        deviation=start,
        resting=float(resting),
        with_seen=return_seen,
    )
    seen = results["seen"] if return_seen else None
    return Shares(results["weights"], results["sum"], seen, results["deviation"])
