"""Load native code as a new process would, inside this one."""

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from membydesign.filter.native import build, compiler, cpu, prebuilt

_CACHED = (
    build.library,
    compiler.sources_digest,
    cpu.features,
    cpu.identity,
    prebuilt._manifest,
    prebuilt.provide_openmp,
)


def forget() -> None:
    """Forget what was loaded, asked and warned of."""
    for function in _CACHED:
        function.cache_clear()
    build._warnings.clear()


@contextmanager
def fresh_process() -> Iterator[None]:
    """Begin and end with nothing loaded."""
    forget()
    try:
        yield
    finally:
        forget()


def load(*sources: str) -> tuple[list[ctypes.CDLL | None], list[str]]:
    """Load sources in float32, and return them with all warnings."""
    with fresh_process(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        libraries = [build.library(source, torch.float32) for source in sources]
    return libraries, [str(warning.message) for warning in caught]
