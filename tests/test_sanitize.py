"""`make sanitize` finds what is planted: a write out of bounds, and undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAULTS = {
    "none": ("x[0] = (float)n;", 0, ""),
    "out of bounds": ("x[n] = 1;", 1, "heap-buffer-overflow"),
    "overflow": ("int y = 2147483647; y += (int)n; x[0] = (float)y;", 1, "signed integer overflow"),
}

PROGRAM = """
import ctypes, sys
from pathlib import Path
import torch
from membydesign.filter.native import build, compiler
compiler.FOLDER = Path(sys.argv[1])
library = build.library("planted.c", torch.float32)
assert library is not None
x = torch.zeros(64)
library.planted(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(64))
print("survived")
"""


def has_sanitizers() -> bool:
    if shutil.which("gcc") is None:
        return False
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    return Path(found.strip()).is_absolute()


@pytest.mark.slow
@pytest.mark.skipif(not has_sanitizers(), reason="gcc without libasan")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_ends_the_process(fault, tmp_path):
    statement, fails, message = FAULTS[fault]
    header = ROOT / "src" / "membydesign" / "filter" / "native" / "csrc" / "target.h"
    source = f'#include "{header}"\n#include <stdint.h>\nvoid planted(float *x, int64_t n) {{ {statement} }}\n'
    (tmp_path / "planted.c").write_text(source)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [str(ROOT / ".ci" / "sanitize"), sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert bool(result.returncode) == bool(fails), result.stderr
    assert message in result.stderr
    assert ("survived" in result.stdout) == (not fails)


@pytest.mark.slow
def test_flags_are_part_of_the_cache(tmp_path):
    """A library compiled with other flags is another file."""
    program = """
import torch
from membydesign.filter.native import build, compiler
assert build.available("mean_pass.c", torch.float32)
"""
    for flags in ("", "-DNOTHING", "-DNOTHING"):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "MEMBYDESIGN_CFLAGS": f"-O0 {flags}"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)
    assert len(list(tmp_path.rglob("mean_pass-float-*.so"))) == 2
