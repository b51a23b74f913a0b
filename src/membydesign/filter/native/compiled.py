"""The native functions as torch operators, for the graphs of torch.compile.

The compiler imports this module when it first meets a native function: to register the operators takes longer than to
import the rest of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.filter.native import operators

if TYPE_CHECKING:
    from membydesign.filter.native.description import Description

OPERATORS: dict[str, Any] = {}
"""Each described function by name, as an operator with a rule for shapes and one for gradients."""


def register() -> None:
    """Register what was described since the last call."""
    for op in operators.DESCRIBED:
        if op.name not in OPERATORS:
            OPERATORS[op.name] = _operator(op)


def _operator(op: Description | Any) -> Any:
    forward, backward = (
        torch.library.custom_op(f"membydesign::{op.name}_{name}", function, mutates_args=(), schema=schema)
        for name, function, schema in (("forward", op.forward, op.schema), ("backward", op.backward, op.schema_back))
    )
    forward.register_fake(op.empty_outputs)
    backward.register_fake(op.empty_gradients)
    forward.register_autograd(
        lambda ctx, *grads: op.gradients(backward, ctx, grads),
        setup_context=lambda ctx, inputs, output: op.remember(ctx, inputs, output),
    )
    return forward


register()
