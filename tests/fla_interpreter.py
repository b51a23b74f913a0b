"""flash-linear-attention's own kernels without a GPU, in Triton's interpreter (TRITON_INTERPRET=1).

The interpreter runs kernels as Python, and three things around these ask for a driver or a compiler, and get a
stand-in: the target (fla looks for one as it is imported), autotuning (the first configuration is taken), and loop
counters, which the kernels treat as tensors. No arithmetic is changed.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
import warnings
from typing import Any

READY = os.environ.get("TRITON_INTERPRET") == "1" and all(map(importlib.util.find_spec, ("fla", "triton", "numpy")))
"""Whether the kernels can be run here."""


class Counter(int):
    """A loop's counter that can be cast as a tensor."""

    def to(self, dtype: object) -> Counter:
        return self


def counters(*bounds: Any):
    return map(Counter, builtins.range(*bounds))


class Driver:
    """Of a target without a device."""

    def get_current_target(self) -> Any:
        compiler = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("cpu", 0, 32)

    def get_benchmarker(self) -> Any:
        return None


def prepare(modules: list[str]) -> None:
    """Import the modules so that their kernels run in the interpreter."""
    runtime = importlib.import_module("triton.runtime")
    autotuner = importlib.import_module("triton.runtime.autotuner")
    runtime.driver.set_active(Driver())

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **{**self.configs[0].kwargs, **kwargs})

    autotuner.Autotuner.run = run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            vars(module)["range"] = counters
