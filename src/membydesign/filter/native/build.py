"""Native code: C without headers of torch, prebuilt in the wheel or compiled once, loaded on first use.

`library` takes the first of these that works:

1. the wheel's prebuilt library for the best level that this CPU has (`prebuilt.py`): nothing to wait for, and as fast
   as code for this very CPU to a few percent. `MEMBYDESIGN_NATIVE=compile` skips it;
2. a library that was compiled here for this CPU (`cache.py`);
3. the C compiler (`compiler.py`).

If none does, it returns None, one warning says why, and everything runs through torch. `MEMBYDESIGN_NATIVE=0` turns
native code off; `MEMBYDESIGN_CPU` lowers the level (`cpu.py`); `MEMBYDESIGN_CFLAGS` compiles with more flags.

Threads are OpenMP's, and where torch brings the same runtime they are torch's own: a pool of our own would compete with
torch's workers, which spin for a while after each product.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import warnings
from typing import TYPE_CHECKING

import torch

from membydesign.filter.native import cache, compiler, cpu, prebuilt

if TYPE_CHECKING:
    from pathlib import Path

REALS = {torch.float32: "float", torch.float64: "double"}


@functools.cache
def library(source: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library of a C source for one floating-point type, or None if unavailable."""
    option = os.environ.get("MEMBYDESIGN_NATIVE")
    if option == "0":
        return None
    reasons = []
    for load in (_compiled,) if option == "compile" or compiler.extra_flags() else (_prebuilt, _compiled):
        try:
            return load(source, REALS[dtype])
        except (compiler.CompilerError, cache.CacheError, prebuilt.PrebuiltError, OSError, ValueError) as error:
            reasons.append(str(error))
    _warn("; ".join(filter(None, reversed(reasons))))
    return None


def available(source: str, dtype: torch.dtype) -> bool:
    """Return whether there is native code of a source for this type."""
    return dtype in REALS and library(source, dtype) is not None


def why_not(source: str, x: torch.Tensor) -> str | None:
    """Why a source cannot filter tensors like x; None if it can."""
    if x.device.type != "cpu":
        return f"for tensors on {x.device}, since native code runs on a CPU"
    if x.dtype not in REALS:
        return f"in {x.dtype}, which native code does not have"
    if not available(source, x.dtype):
        return "on this machine, where native code is unavailable (a warning said why)"
    return None


# What torch.compiler.assume_constant_result does, without importing torch's compiler: asked, and not traced.
available._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

_warnings: list[str] = []
"""The warning of this process, once there was one."""


def _warn(reason: str) -> None:
    """Say once in a process why there is no native code."""
    if not _warnings:
        message = f"membydesign filters through torch (slower, the same numbers): {reason}"
        warnings.warn(message, stacklevel=4)
        _warnings.append(message)


def _prebuilt(source: str, real: str) -> ctypes.CDLL:
    return _loaded(prebuilt.find(source, real))


def _compiled(source: str, real: str) -> ctypes.CDLL:
    """Load a library from the cache, or compile it now; safe when several processes start at once."""
    command, march = compiler.find(), cpu.target()

    def build(target: Path, problem: str | None) -> None:
        scope = f"for this process only: {problem}" if problem else "once for this machine"
        print(f"membydesign: compiling {source} ({real}), {scope}", file=sys.stderr)
        compiler.compile_shared(command, source, real, march, target)

    try:
        key = (
            compiler.sources_digest(),
            compiler.identity(command),
            *command[1:],
            *compiler.flags(),
            march,
            cpu.identity(),
        )
        name = f"{source.removesuffix('.c')}-{real}-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}"
        with cache.library(name, build, keep=cpu.identity() is not None) as path:
            return _loaded(path)
    except compiler.CompilerError as error:
        raise compiler.CompilerError(f"{source} could not be compiled: {error}") from None


def _loaded(path: Path) -> ctypes.CDLL:
    """Load a library, if the CPU has the instructions that it was compiled with."""
    result = ctypes.CDLL(str(path))
    needed = ctypes.c_char_p.in_dll(result, "target_features").value or b""
    if lacking := cpu.lacking(needed.decode()):
        raise OSError(f"{path.name} needs instructions that this CPU lacks: {lacking}")
    return result
