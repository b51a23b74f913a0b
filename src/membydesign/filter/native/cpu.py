"""What instructions this CPU has, and which of them native code may use.

Nothing here imports torch, so that the build hook of the wheel (`hatch_build.py`) can read the levels too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

LIMIT = "MEMBYDESIGN_CPU"
"""The environment variable that names the highest level to use."""

_X86 = {
    "x86-64": "",
    "x86-64-v2": "pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
_ARM = {"armv8-a": "fp asimd"}
_LEVELS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""The levels of each architecture as compilers name them, lowest first; what each adds, as /proc/cpuinfo names it."""


def levels() -> tuple[str, ...]:
    """Return all levels of this architecture, lowest first."""
    return tuple(_LEVELS.get(platform.machine().lower(), ()))


@functools.cache
def features() -> frozenset[str] | None:
    """Return the instruction sets of this CPU as the kernel names them, or None if unavailable."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            for line in file:  # the first CPU is enough, and the whole file takes milliseconds on large machines
                name, _, value = line.partition(b":")
                if name.strip().lower() in (b"flags", b"features"):
                    return frozenset(value.decode("ascii", "replace").split())
    except OSError:
        pass
    return None


def supported() -> tuple[str, ...]:
    """Return the levels that this CPU has, lowest first; at least the lowest, which the architecture guarantees."""
    present, result = features() or frozenset(), []
    for level, added in _LEVELS.get(platform.machine().lower(), {}).items():
        if result and not present.issuperset(added.split()):
            break
        result.append(level)
    return tuple(result)


def usable() -> tuple[str, ...]:
    """Return the levels that this CPU has and the environment variable `LIMIT` allows, lowest first.

    Raises:
        ValueError: the variable does not name a level of this architecture.
    """
    limit = os.environ.get(LIMIT)
    if not limit:
        return supported()
    if limit not in levels():
        raise ValueError(f"{LIMIT}: expected one of {', '.join(levels()) or 'no value'}, got {limit!r}")
    return tuple(level for level in supported() if levels().index(level) <= levels().index(limit))


def target() -> str:
    """Return what to compile for, as the compiler's `-march`: this very CPU, or the level that `LIMIT` lowers it to."""
    return usable()[-1] if os.environ.get(LIMIT) else "native"


def lacking(needed: str) -> str:
    """Return those of the instruction sets `needed` that this CPU lacks; none if it cannot be asked."""
    present = features()
    return "" if present is None else " ".join(name for name in needed.split() if name not in present)


@functools.cache
def identity() -> str | None:
    """Return a text that differs between CPUs for which `-march=native` may differ, or None if unavailable."""
    if features() is not None:
        return f"{platform.machine()} {' '.join(sorted(features() or ()))}"
    model = _apple_model() if sys.platform == "darwin" else platform.processor() if os.name == "nt" else ""
    return f"{platform.machine()} {model}" if model else None


def _apple_model() -> str:
    text, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    try:
        failed = ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", text, ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return ""
    return "" if failed else text.value.decode("ascii", "replace")
