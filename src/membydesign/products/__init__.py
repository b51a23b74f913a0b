r"""Matrix products in full float32 precision, whatever precision torch may use for other products.

`torch.set_float32_matmul_precision("high")` and similar settings let a GPU multiply float32 matrices in TF32, with 10
bits of mantissa, and a CPU in bfloat16. That is fine for the weights of a network, but a filter subtracts covariances
of almost equal size and cannot afford the lost digits: it computes all products with the functions of this module.

The setting is global to the process, not to a thread or a stream. It is changed while a product is launched and
restored immediately; a lock and a count of holders keep filters in several threads from undoing each other's change. If
torch does not round, which is its default, a product is a plain `a @ b` and no setting is touched.

Gradients are products too, computed later on autograd's threads: the backward passes of `product`, `cholesky` and
`solve_lower` call these functions again. If the setting is loosened between forward and backward, products that were
plain in forward do not notice. torch.compile traces the three as opaque operators, because a graph cannot change the
setting. It recompiles when the CUDA setting changes; after a change of the CPU setting alone, call
`torch.compiler.reset()`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

BACKENDS = {"cuda": "cuda", "cpu": "mkldnn", "xpu": "mkldnn"}
"""Library that multiplies on each device type; other devices do not round."""

_BY_BACKEND = hasattr(torch.backends.cuda.matmul, "fp32_precision")
"""Whether each library has its own setting (since PyTorch 2.9), or all share one."""

_lock = threading.Lock()
_holders = 0
_changes = 0
"""Odd while the setting is changed. Reading the same even number before and after a read of the setting proves that the
value read is the user's."""

_before: tuple[str | None, dict[str, str]] = (None, {})
"""User's setting, saved by the first holder."""


class _Here(threading.local):
    """Thread-local nesting depth of `full_precision`."""

    depth = 0


_here = _Here()


def rounds(kind: str) -> bool:
    """Whether torch may round the factors of float32 products on a device type ("cuda", "cpu", ...)."""
    backend = BACKENDS.get(kind)
    if backend is None:
        return False
    changes = _changes
    setting = _setting(backend)
    if changes % 2 or changes != _changes:  # rare, so a lock is affordable: another filter is multiplying
        with _lock:
            setting = _before[1][backend] if _holders else _setting(backend)
    return setting not in ("ieee", "none")


rounds._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # torch.compile guards the setting


class full_precision:
    """Context manager that keeps torch from rounding float32 products on a device type."""

    def __init__(self, kind: str) -> None:
        self.changes = rounds(kind)

    def __enter__(self) -> None:
        """Change the setting, unless torch rounds nothing or another holder has changed it already."""
        global _holders, _before, _changes
        if self.changes:
            with _lock:
                if not _holders:
                    _changes += 1
                    _before = _tightened()
                _holders += 1
        _here.depth += 1

    def __exit__(self, *_: object) -> None:
        """Restore the setting if this was the last holder."""
        global _holders, _changes
        _here.depth -= 1
        if not self.changes:
            return
        with _lock:
            _holders -= 1
            if not _holders:
                _put_back(*_before)
                _changes += 1


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices [..., n, k] and [..., k, m], like `a @ b`."""
    if not _guarded(a):
        return a @ b
    if torch.compiler.is_compiling():
        from membydesign.products import operators

        return operators.PRODUCT(a, b)
    return _Product.apply(a, b)


def cholesky(a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute L with a = L Lᵀ, and the order of the first minor that is not positive, or 0, like `cholesky_ex`."""
    if not _guarded(a):
        return torch.linalg.cholesky_ex(a)
    if torch.compiler.is_compiling():
        from membydesign.products import operators

        return operators.CHOLESKY(a)
    return _Cholesky.apply(a)


def solve_lower(a: Tensor, b: Tensor, *, unitriangular: bool = False) -> Tensor:
    """Compute a⁻¹ b for lower-triangular a and matrices b of the same leading shape."""
    if not _guarded(a):
        return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=unitriangular)
    if torch.compiler.is_compiling():
        from membydesign.products import operators

        return operators.SOLVE(a, b, unitriangular)
    return _Solve.apply(a, b, unitriangular)


def _guarded(x: Tensor) -> bool:
    if x.dtype != torch.float32:
        return False
    # Dynamo cannot read thread-local data and need not: no graph is traced inside of `full_precision`.
    if not torch.compiler.is_compiling() and _here.depth:
        return False
    return rounds(x.device.type)


# ---------------------------------------------------------------------------------------------------- the setting


_LIBRARIES: dict[str, Any] = {
    name: getattr(getattr(torch.backends, name), "matmul", None) for name in dict.fromkeys(BACKENDS.values())
}


def _setting(backend: str) -> str:
    """Return the precision of a library: "ieee", "none" (not set), "tf32" or "bf16"."""
    if _BY_BACKEND:
        return _LIBRARIES[backend].fp32_precision
    return {"highest": "ieee", "high": "tf32", "medium": "bf16"}[torch.get_float32_matmul_precision()]


def _tightened() -> tuple[str | None, dict[str, str]]:
    """Forbid rounding and return the previous setting, for `_put_back`."""
    settings, shared = {name: _setting(name) for name in _LIBRARIES}, None
    try:
        # Change the older setting too, because torch raises if the two disagree; it raises here if the user mixed them.
        shared = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:
        pass
    if _BY_BACKEND:
        for library in _LIBRARIES.values():
            library.fp32_precision = "ieee"
    return shared, settings


def _put_back(shared: str | None, settings: dict[str, str]) -> None:
    if shared is not None:
        torch.set_float32_matmul_precision(shared)
    if _BY_BACKEND:
        for name, value in settings.items():
            _LIBRARIES[name].fp32_precision = "none"  # inherits `torch.backends.fp32_precision`
            if _LIBRARIES[name].fp32_precision != value:
                _LIBRARIES[name].fp32_precision = value


# --------------------------------------------------------------------------------------------------- the operators


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in full float32, whatever torch's matmul precision is."""
    with full_precision(a.device.type):
        return a @ b


def remember_product(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Keep both factors."""
    del output
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def product_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both factors: g bᵀ and aᵀ g."""
    a, b = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    return (
        product(g, b.mT).sum_to_size(a.shape) if need_a else None,
        product(a.mT, g).sum_to_size(b.shape) if need_b else None,
    )


class _Product(torch.autograd.Function):
    """`multiplied` with its gradient, for eager mode, torch.func and second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return multiplied(a, b)

    setup_context = staticmethod(remember_product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return product_gradients(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        (a, b), (da, db) = ctx.saved_tensors, tangents
        left, right = None if da is None else product(da, b), None if db is None else product(a, db)
        return left if right is None else right if left is None else left + right


def solved(a: Tensor, b: Tensor, unitriangular: bool) -> Tensor:
    """Compute a⁻¹ b for lower-triangular a."""
    return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=unitriangular)


def solve_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Gradients of the triangle and of the right-hand side."""
    a, x = ctx.saved_tensors
    db = torch.linalg.solve_triangular(a.mT, g, upper=True, unitriangular=ctx.unitriangular)
    da = -product(db, x.mT).tril(-1 if ctx.unitriangular else 0) if ctx.needs_input_grad[0] else None
    return da, db, None


def remember_solve(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    """Keep the triangle and the solution."""
    ctx.unitriangular = inputs[2]
    ctx.save_for_backward(inputs[0], output)
    ctx.save_for_forward(inputs[0], output)


class _Solve(torch.autograd.Function):
    """`solved` with a gradient in full precision; torch's own uses a plain product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, unitriangular: bool) -> Tensor:
        return solved(a, b, unitriangular)

    setup_context = staticmethod(remember_solve)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return solve_gradients(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (a, x), (da, db, _) = ctx.saved_tensors, tangents
        right = torch.zeros_like(x) if db is None else db
        if da is not None:
            right = right - product(da.tril(-1 if ctx.unitriangular else 0), x)
        return solved(a, right, ctx.unitriangular)


def factored(a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the Cholesky factor, and the order of the first minor that is not positive."""
    factor, info = torch.linalg.cholesky_ex(a)
    return factor, info  # a plain tuple, as torch.vmap needs it


def remember_factor(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Keep the factor."""
    del inputs
    ctx.save_for_backward(output[0])


class _Cholesky(torch.autograd.Function):
    """`factored` with a gradient in full precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> tuple[Tensor, Tensor]:
        return factored(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        remember_factor(ctx, inputs, output)
        ctx.save_for_forward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return cholesky_gradient(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, None]:
        """L Φ(L⁻¹ da L⁻ᵀ), where Φ takes the lower triangle and half of the diagonal."""
        (L,), (da,) = ctx.saved_tensors, tangents
        if da is None:
            return None, None
        inner = solved(L, solved(L, (da + da.mT) / 2, False).mT, False)
        return product(L, inner.tril() - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)) / 2), None


def cholesky_gradient(ctx: Any, g: Tensor | None, _: Tensor | None = None) -> Tensor | None:
    """½ L⁻ᵀ S L⁻¹, where S is symmetric and has the lower triangle of Lᵀ g."""
    if g is None:
        return None
    (L,) = ctx.saved_tensors
    lower = product(L.mT, g).tril()
    half = torch.linalg.solve_triangular(L.mT, lower + lower.tril(-1).mT, upper=True)
    return 0.5 * torch.linalg.solve_triangular(L, half, upper=False, left=False)
