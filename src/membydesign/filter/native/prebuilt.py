"""Libraries that came with the wheel, for several levels of each architecture: the best that this CPU has is loaded.

`hatch_build.py` compiles them and writes a manifest with the hash of the sources and of every library. They name no
OpenMP runtime: the loader takes its functions from the one that torch has brought into the process, so there is one
pool of threads and no second copy of libgomp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from membydesign.filter.native import compiler, cpu

FOLDER = Path(__file__).with_name("prebuilt")
"""Where the wheel has them; absent in a checkout and in a wheel for all platforms."""


class PrebuiltError(RuntimeError):
    """There is no prebuilt library for this machine; the message says why, and is empty if the package has none."""


def find(source: str, real: str) -> Path:
    """Return the library of a source for the best level that this CPU has and that `MEMBYDESIGN_CPU` allows.

    Raises:
        PrebuiltError: there is none for these sources and this CPU, or it is damaged.
        ValueError: the variable does not name a level.
    """
    manifest = _manifest()
    if manifest["sources"] != compiler.sources_digest():
        raise PrebuiltError("prebuilt code is of other sources")
    libraries: dict[str, str] = manifest["libraries"]
    names = {level: compiler.prebuilt_name(source, real, level) for level in cpu.levels()}
    usable = [level for level in cpu.usable() if names[level] in libraries]
    if not usable:
        built = [level for level in names if names[level] in libraries] or ["another architecture"]
        raise PrebuiltError(f"prebuilt code is for {', '.join(built)}, and at most {cpu.usable()[-1]} can be used")
    name = names[usable[-1]]
    if hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() != libraries[name]:
        raise PrebuiltError(f"prebuilt code is damaged ({name}): install the package again")
    provide_openmp()
    return FOLDER / name


@functools.cache
def _manifest() -> dict[str, Any]:
    try:
        return json.loads((FOLDER / compiler.MANIFEST).read_bytes())
    except FileNotFoundError:
        raise PrebuiltError("") from None
    except ValueError:
        raise PrebuiltError(f"prebuilt code is damaged ({compiler.MANIFEST}): install the package again") from None


@functools.cache
def provide_openmp() -> None:
    """Make OpenMP's functions visible to libraries that are loaded next, from torch's runtime if it has one."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):  # as torch does by itself, in its usual builds
        return
    package = Path(torch.__file__).parent
    own = (*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*"))
    for name in (*map(str, own), "libgomp.so.1"):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise PrebuiltError("prebuilt code needs OpenMP, and neither torch nor the system has libgomp")
