"""Evidence that adds up, in native code on a CPU: the sums of an `AdditiveDesign` on `csrc/mean_pass.c`.

Outputs, states and variances that are linear in the sums are native; the densities of writes, which are not, are
computed in torch, chunk by chunk (`filter/torch/additive.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign import design as designs
from membydesign.filter.native import build as native
from membydesign.filter.native import totals
from membydesign.filter.native.mean_pass import SOURCE, chunk_size, mean_pass
from membydesign.filter.torch import additive

if TYPE_CHECKING:
    from membydesign.design import Design
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, sums in chunks", "native"


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    reason = additive.why_not(design, request)
    return reason or native.why_not(SOURCE, request.x.q) or native.why_not(totals.SOURCE, request.x.q)


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] with the native mean pass."""
    assert isinstance(design, designs.AdditiveDesign)
    size = request.tokens_in_chunk(chunk_size(request.x.q.shape[-1]))
    return additive.run_with(design, request, mean_pass, size, totals.shares)
