"""Which Triton the GPU kernels need, and what happens where a kernel cannot be used.

`backend="triton"` raises a `KernelError` that names Triton's version and the cause. `backend="auto"` issues a
`KernelWarning`, once for each cause, and computes the same through torch. Nothing here imports Triton before a kernel
is wanted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING

import torch

from membydesign.errors import KernelError, KernelWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

OLDEST = (3, 5)
"""The oldest Triton that compiles the kernels. CUDA builds of PyTorch bring 3.5.1 (2.9) to 3.7.1 (2.13)."""

REQUIREMENT = f"triton>={OLDEST[0]}.{OLDEST[1]}"
UPGRADE = "CUDA builds of PyTorch 2.9 and newer bring one that is new enough"

_failed: set[Hashable] = set()
"""Kernels that did not compile or launch: compiling them again would take seconds and fail again."""

_warned: set[str] = set()


@functools.cache
def version() -> str | None:
    """The version of the installed Triton, without importing it; None if there is none."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed() -> bool:
    """Whether Triton is installed in a version that compiles the kernels."""
    return _new_enough(version())


@functools.cache
def _new_enough(present: str | None) -> bool:
    return present is not None and tuple(map(int, present.split(".")[:2])) >= OLDEST


def refuse() -> None:
    """Raise if `backend="triton"` cannot be had here: Triton is missing, too old, or cannot be imported."""
    if not installed():
        present = version()
        expected = 'backend: expected one that is installed, got "triton"'
        if present is None:
            raise ValueError(f'{expected}: pip install "{REQUIREMENT}"')
        raise ValueError(f"{expected} with Triton {present}, and the kernels need {REQUIREMENT}: {UPGRADE}")
    error = _import_error()
    if error is not None:
        raise KernelError(_sentence("cannot be imported", error)) from error


def usable() -> bool:
    """Whether `backend="auto"` may take the kernels; warns once if Triton is there and cannot be used."""
    present = version()
    if present is None:
        return False
    if not installed():
        _warn(f"Triton {present} is too old for the GPU kernels, which need {REQUIREMENT}: {UPGRADE}")
        return False
    error = _import_error()
    if error is not None:
        _warn(_sentence("cannot be imported", error))
    return error is None


usable._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # asked by torch.compile, not traced


def run(title: str, key: Hashable, launch: Callable[[], None], *, fallback: bool) -> bool:
    """Compile and launch a kernel; False if that failed and the caller is to compute the same through torch.

    Args:
        title: what the kernel is called in messages.
        key: what distinguishes compiled variants: one that failed is not compiled again.
        launch: calls the kernel.
        fallback: warn and return False, rather than raise a `KernelError`.
    """
    if fallback and key in _failed:
        return False
    try:
        launch()
    except Exception as error:  # Triton, LLVM, ptxas, a C compiler and the driver each have errors of their own
        if _passes(error):
            raise
        message = _sentence(f"cannot run the {title} kernel", error)
        if not fallback:
            raise KernelError(message) from error
        _warn(message, cause=described(error))
        _failed.add(key)
    else:
        return True
    return False


def _passes(error: Exception) -> bool:
    """Whether the kernel is not to blame and may run next time: memory is full, or a CUDA graph is being captured."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _import_error() -> Exception | None:
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation: missing libraries, another Python, ...
        return error.with_traceback(None)
    return None


def _sentence(failure: str, error: Exception) -> str:
    return f"Triton {version()} {failure}: {described(error)}"


def described(error: Exception) -> str:
    """An error in one line: Triton's compiler begins with the place and ends with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " … ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else "no message"
    return f"{type(error).__name__}: {said[:400]}"


def _warn(message: str, cause: str | None = None) -> None:
    """Say once for each cause that torch is used instead."""
    if (cause or message) not in _warned:
        warnings.warn(f"membydesign filters through torch (slower, the same results): {message}", KernelWarning, 2)
        _warned.add(cause or message)  # afterwards: a warning that is an exception is raised every time
