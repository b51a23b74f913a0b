"""Run a module of this folder in a fresh process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import membydesign

FOLDER = Path(__file__).resolve().parents[1]
"""The folder that holds `membydesign_bench` and `kernel_checks`."""

SOURCE = Path(membydesign.__file__).resolve().parents[1]


def command(module: str, *words: object) -> list[str]:
    """Return the command line that runs a module; start it with `options`."""
    return [sys.executable, "-W", "ignore", "-m", module, *map(str, words)]


def options(**variables: str) -> dict[str, Any]:
    """Return arguments for `subprocess`, with environment variables, so that the child loads this very code.

    `python -m` looks for modules in the working directory first, so that is set to the folder of the benchmarks.
    """
    paths = [str(SOURCE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"cwd": FOLDER, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}}
