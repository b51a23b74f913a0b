"""Compile the GPU kernels for A100 and H100 with several versions of Triton, on any machine.

    .venv/bin/python .ci/kernels.py                                what `make kernels` runs: three versions
    .venv/bin/python .ci/kernels.py --quick                        one size for H100 with each of them, a minute
    .venv/bin/python .ci/kernels.py --table 3.5.1 3.6.0 3.7.1 3.9.0    the table of docs/internals/gpu.md

Without arguments: all kernels with the Triton in this environment, which is the one that the pinned torch brings with
CUDA, and the largest variant of each with the oldest and the newest. Other versions are installed beside this
environment, Triton alone, in folders of their own. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OLDEST, NEWEST = "3.5.1", "3.9.0"
"""The oldest and the newest Triton that the kernels are compiled with."""

CHECK = (sys.executable, "-m", "membydesign.cli", "kernels", "check", "--no-run", "--targets", "sm_80,sm_90")
LARGEST = ("--variants", "rotation")


def main() -> int:
    """Check the versions that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", help="versions of Triton; default: the installed one, the oldest and the newest"
    )
    parser.add_argument("--table", action="store_true", help="print a Markdown table of the largest variants instead")
    parser.add_argument("--quick", action="store_true", help="compile the largest variant at D = 64 for H100 alone")
    options = parser.parse_args()
    installed = importlib.metadata.version("triton")
    versions = options.versions or list(dict.fromkeys((installed, OLDEST, NEWEST)))
    if options.table:
        print(table({version: compiled(version) for version in versions}))
        return 0
    failed = 0
    for version in versions:
        which = ("--variants", "decay,rotation") if version == installed and not options.quick else LARGEST
        fewer = ("--sizes", "64", "--targets", "sm_90") if options.quick else ()
        failed |= subprocess.run([*CHECK, *which, *fewer], env=environment(version), check=False).returncode
    return int(failed != 0)


def environment(version: str) -> dict[str, str]:
    """This environment with another Triton in front, which is installed first if it is not there."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if version == importlib.metadata.version("triton"):
        return variables
    folder = Path(sys.prefix) / f"triton-{version}"
    if not (folder / "triton").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        subprocess.run([*pip, "--target", str(folder), f"triton=={version}"], check=True)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


def compiled(version: str) -> dict[tuple[Any, ...], str]:
    """Registers / bytes spilled / bytes of shared memory of each layout on each target, the largest variant of each."""
    command = [*CHECK, *LARGEST, "--json"]
    done = subprocess.run(command, env=environment(version), check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    assert result["triton"] == version, f"expected Triton {version}, got {result['triton']}"
    cells: dict[tuple[Any, ...], list[str]] = {}
    for x in result["compiled"]:
        tiles = [x["tiles"][name] or "all" for name in ("panel", "columns", "warps")]
        failed = "does not compile" in (x["complaint"] or "")
        cell = "fails" if failed else f"{x['registers']} / {x['spills']:,} / {x['shared'] / 1024:.0f}"
        cells.setdefault((x["kernel"], x["D"], *tiles), []).append(cell)
    return {row: " · ".join(both) for row, both in cells.items()}


def table(result: dict[str, dict[tuple[Any, ...], str]]) -> str:
    """A line for each layout, a column for each version, A100 before H100."""
    headings = ["kernel", "D", "panel", "columns", "warps", *(f"Triton {version}" for version in result)]
    lines = [headings, ["---"] * len(headings)]
    for row in next(iter(result.values())):
        lines.append([*map(str, row), *(cells.get(row, "") for cells in result.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
