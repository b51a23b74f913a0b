"""Native code, compiled once: one C source, no headers of torch, a cache on disk that follows source, compiler and CPU.

Threads are OpenMP's, and where torch brings the same runtime they are torch's own: a pool of our own would compete with
torch's workers, which spin for a while after each product.

Where it cannot be had (no compiler, an odd platform) `library` returns None, says so in one line, and everything runs
through torch. `MEMBYDESIGN_NATIVE=0` turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-std=gnu11",
)
FOLDER = Path(__file__).with_name("c")
"""Where the C sources are."""

REALS = {torch.float32: "float", torch.float64: "double"}


@functools.cache
def library(source: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled library of a C source in `FOLDER` for one floating-point type, or None where it cannot be had."""
    if os.environ.get("MEMBYDESIGN_NATIVE") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        return _without("no C compiler was found")
    try:
        return ctypes.CDLL(str(_compiled(FOLDER / source, REALS[dtype], compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        return _without(f"{source} could not be compiled: {getattr(error, 'stderr', None) or error}")


def available(source: str, dtype: torch.dtype) -> bool:
    """Whether a source can be had for this type."""
    return dtype in REALS and library(source, dtype) is not None


# What torch.compiler.assume_constant_result does, without importing torch's compiler: asked, and not traced.
available._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _without(reason: str) -> None:
    """Say once why there is no native code."""
    warnings.warn(f"membydesign filters through torch (slower, the same numbers): {reason}", stacklevel=4)


def _compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiled(source: Path, real: str, compiler: str) -> Path:
    """The shared library, from the cache or made now; safe when several processes start at once."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = "\n".join(
        (*(f.read_text() for f in sorted(source.parent.glob("*.[ch]"))), source.name, real, version, *FLAGS, _cpu())
    )
    folder = _cache_folder()
    target = folder / f"{source.stem}-{real}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"membydesign: compiling {source.name} ({real}), once for this machine", file=sys.stderr)
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        os.close(handle)
        try:
            command = [compiler, *FLAGS, f"-DREAL={real}", str(source), "-o", partial, "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            os.replace(partial, target)  # whole or not at all; a second process replaces it by the same
        finally:
            Path(partial).unlink(missing_ok=True)
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "membydesign"


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
