"""The functions of `products` as torch operators that are opaque to the compiler, which imports this module when it
first meets one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign import products

if TYPE_CHECKING:
    from collections.abc import Callable


def _operator(
    name: str, run: Callable[..., Any], remember: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operator. `run` also infers the shapes of its results."""
    operator = torch.library.custom_op(f"membydesign::{name}", run, mutates_args=())
    operator.register_fake(run)
    operator.register_autograd(gradients, setup_context=remember)
    return operator


PRODUCT = _operator("product", products.multiplied, products.remember_product, products.product_gradients)
SOLVE = _operator("solve_lower", products.solved, products.remember_solve, products.solve_gradients)
CHOLESKY = _operator("cholesky", products.factored, products.remember_factor, products.cholesky_gradient)
