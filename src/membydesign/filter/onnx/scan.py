"""Any design as a `Scan` of ONNX, whose body is the specification: predict, condition and read of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.filter import loop
from membydesign.filter.inputs import Inputs, Run
from membydesign.state import map_state, named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Request

NAME, BACKEND = "Scan", "onnx"


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] with the body of one token, traced once whatever T is."""
    from torch._higher_order_ops.scan import scan

    names = tuple(request.x.parameters)
    returned = {"variance": request.return_variance, "log_evidence": request.return_evidence}

    def body(parts: list[Tensor], token: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, *parameters = (x[:, None] for x in token)
        inputs = Inputs(q, k, v, dict(zip(names, parameters, strict=True)))
        written, reading = loop.step(design, _of_parts(parts, request.initial), inputs, 0)
        results = [reading.mean]
        if returned["variance"]:
            assert reading.variance is not None
            results.append(reading.variance)
        if returned["log_evidence"]:
            results.append(written.log_evidence)
        return [_fresh(x) for x in _parts(written.state)], [_fresh(x) for x in results]

    tokens = [_fresh(x.movedim(1, 0)) for x in request.x.named().values()]
    end, results = scan(body, [_fresh(x) for x in _parts(request.initial)], tokens)
    output, *more = (x.movedim(0, 1) for x in results)
    named = dict(zip((name for name, wanted in returned.items() if wanted), more, strict=True))
    state = _of_parts(end, request.initial)
    return Run(output, state, variance=named.get("variance"), write_log_evidence=named.get("log_evidence"))


def _parts(state: Any) -> list[Tensor]:
    return [x for _, x in named_tensors(state)]


def _of_parts(parts: Iterable[Tensor], form: Any) -> Any:
    """The state of the given form with other tensors."""
    remaining = iter(list(parts))
    return map_state(lambda _: next(remaining), form)


def _fresh(x: Tensor) -> Tensor:
    """A contiguous copy: `scan` takes no views, and wants the layout of a state to stay what it is."""
    return x.clone(memory_format=torch.contiguous_format)
