"""Squared norms of keys in native code on a CPU, `csrc/norms.c`: for gains that are known in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign.design.sequence_drift import squared_norm
from membydesign.filter.native import build as native
from membydesign.filter.native import operators as operator
from membydesign.filter.native.description import Description, Input, Output

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "norms.c"

OPERATOR = operator.differentiable(
    Description(
        "norms",
        lambda _: SOURCE,
        inputs=(Input("k", "k"),),
        outputs=(Output("squares", "squares", lambda x: x.k.shape[:-1]),),
        numbers=lambda x: {"T": x.k.shape[1], "D": x.k.shape[-1]},
    )
)


def squared_norms(k: Tensor) -> Tensor:
    """The squared norm of every key: [B,T,H,D] → [B,T,H,1]."""
    if torch.compiler.is_compiling() or not native.available(SOURCE, k.dtype):  # compiled graphs fuse this anyway
        return squared_norm(k)
    return OPERATOR.apply(k=k)["squares"].unsqueeze(-1)
