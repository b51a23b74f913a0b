"""Linear recurrences in native code on a CPU: every `LinearRecurrence` on `csrc/mean_pass.c`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign import design as designs
from membydesign.filter.native import build as native
from membydesign.filter.native.mean_pass import SOURCE, chunk_size, mean_pass
from membydesign.filter.torch import recurrence

if TYPE_CHECKING:
    from membydesign.design import Design
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "native, linear recurrence in chunks", "native"


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    return recurrence.why_not(design, request) or native.why_not(SOURCE, request.x.q)


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] with the native mean pass."""
    assert isinstance(design, designs.LinearRecurrence)
    return recurrence.run_with(design, request, mean_pass, chunk_size(request.x.q.shape[-1]))
