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
from dataclasses import replace
from pathlib import Path

import torch

import membydesign as mbd
from membydesign.filter.kernels import KERNELS, why_not_each
from membydesign.filter.native import build, compiler, cpu, prebuilt
from membydesign.testing import Problem, random_problem


def main() -> None:
    """Load all libraries and filter with every design of the catalogue."""
    warnings.simplefilter("error")
    level = sys.argv[1] if len(sys.argv) > 1 else cpu.usable()[-1]
    for source in sorted(path.name for path in compiler.FOLDER.glob("*.c")):
        for dtype, real in build.REALS.items():
            library = build.library(source, dtype)
            assert library is not None
            assert Path(library._name) == prebuilt.FOLDER / compiler.prebuilt_name(source, real, level), library
    filtered = [name for name, design in mbd.catalogue.items() if runs_natively(design)]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        for name in filtered:
            problem = bounded(random_problem(mbd.catalogue[name], T=70, H=4, D=16, M=16, dtype=dtype))
            native, loop = problem.filter(backend="native").output, problem.filter(method="recurrent").output
            assert (native - loop).abs().max() < tolerance * max(1.0, float(loop.abs().max())), name
    runtimes = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.]\S*", Path("/proc/self/maps").read_text()))
    assert len(runtimes) == 1, runtimes
    print(f"{len(filtered)} designs filtered by prebuilt code for {level}, with threads of {runtimes.pop()}")


def bounded(problem: Problem) -> Problem:
    """Make parameters without a bound small, so that transitions of all kinds contract over many tokens."""
    free = {parameter.name for parameter in problem.design.step_parameters if parameter.bound == "finite"}
    scaled = {name: 0.1 * x if name in free else x for name, x in problem.parameters.items()}
    return replace(problem, parameters=scaled)


def runs_natively(design: mbd.Design) -> bool:
    """Whether native code filters sequences of a design, as kernels themselves say."""
    native = {kernel.NAME for kernel in KERNELS if kernel.BACKEND == "native"}
    return any(name in native and reason is None for name, reason in why_not_each(design, 16, 16).items())


if __name__ == "__main__":
    main()
