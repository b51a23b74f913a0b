"""Filter with the prebuilt code of an installed wheel, and show which libraries were loaded.

Run it with the Python of an environment that has the wheel, and with a PATH without a compiler:
    env PATH=/none CC= /path/to/environment/bin/python .ci/try_prebuilt.py [level]
It fails if a library is not a prebuilt one of this level (default: the best that the CPU has and MEMBYDESIGN_CPU
allows), if its numbers differ from the loop over tokens, or if the process has two OpenMP runtimes.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import get_args

import torch

import membydesign as mbd
from membydesign.design.catalogue import LinearGaussian
from membydesign.filter.native import build, compiler, cpu, prebuilt

LINEAR = set(get_args(LinearGaussian)) - {"robust_writes"}  # whose noise is known only token by token
NUMBERS = {"log_decay": -0.1, "process_noise": 0.1, "write_noise": 0.2, "prior_variance": 1.0, "angle": 0.3}


def main() -> None:
    """Load all libraries and filter with every design of the catalogue."""
    warnings.simplefilter("error")
    level = sys.argv[1] if len(sys.argv) > 1 else cpu.usable()[-1]
    for source in sorted(path.name for path in compiler.FOLDER.glob("*.c")):
        for dtype, real in build.REALS.items():
            library = build.library(source, dtype)
            assert library is not None
            assert Path(library._name) == prebuilt.FOLDER / compiler.prebuilt_name(source, real, level), library
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        q, k, v = torch.randn(3, 2, 70, 4, 16, dtype=dtype).unbind()
        for name, design in mbd.catalogue.items():
            if name not in LINEAR:
                continue
            step = {parameter.name: NUMBERS[parameter.name] for parameter in design.step_parameters}
            native = mbd.filter_sequence(design, q, k, v, **step, backend="native")
            loop = mbd.filter_sequence(design, q, k, v, **step, method="recurrent")
            assert (native.output - loop.output).abs().max() < tolerance, name
    runtimes = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.]\S*", Path("/proc/self/maps").read_text()))
    assert len(runtimes) == 1, runtimes
    print(f"{len(mbd.catalogue)} designs filtered by prebuilt code for {level}, with threads of {runtimes.pop()}")


if __name__ == "__main__":
    main()
