"""Which operator of ONNX runs a design, or why none does: the answer without ONNX being installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from membydesign.filter import loop
from membydesign.filter.onnx import linear_attention, scan

if TYPE_CHECKING:
    from membydesign.design import Design
    from membydesign.filter.inputs import Request

ABSENT = (
    "cholesky",
    "linalg_cholesky",
    "linalg_inv",
    "linalg_ldl",
    "linalg_lstsq",
    "linalg_lu",
    "linalg_qr",
    "linalg_solve",
    "_linalg_eigh",
    "_linalg_solve",
    "_linalg_svd",
    "triangular_solve",
)
"""How the names of torch's operators start for which ONNX has none: factorisations and solutions of systems."""


class Support(NamedTuple):
    """How ONNX runs a design.

    Attributes:
        operator: "LinearAttention" or "Scan"; None if it cannot.
        reason: why not this or the better operator; "" for LinearAttention.
    """

    operator: str | None
    reason: str


def support(design: Design, request: Request) -> Support:
    """The operator for a design, and why no better one.

    Args:
        design: the assumptions.
        request: a sample of what is to be filtered, with one token at least.
    """
    reason = linear_attention.why_not(design, request)
    if reason is None:
        return Support(linear_attention.NAME, "")
    with _Names() as seen:
        loop.step(design, request.initial, request.x, 0)
    absent = sorted({name for name in seen.names if name.startswith(ABSENT)})
    if absent:
        return Support(None, f"a step of {design.title} computes {', '.join(absent)}, which ONNX has no operator for")
    return Support(scan.NAME, reason)


class _Names(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
