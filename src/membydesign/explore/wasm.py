"""Compile the decoding step in C to WebAssembly: `python -m membydesign.explore.wasm`, or `make explorer`.

It needs the Python package ziglang, which brings a C compiler and a C library for WebAssembly. The result is part of
the package, and step.json says what it was made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

from membydesign.explore import FOLDER
from membydesign.filter.native import compiler

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = "step.c"
EXPORTS = ("step", "malloc", "free", "Sizes_layout", "Tensors_layout", "Rule_cases")
"""What the page calls and reads."""
OPTIONS = (
    *("-target", "wasm32-wasi", "-mexec-model=reactor", "-msimd128", "-O3", "-s"),
    *("-std=gnu11", "-fno-math-errno", "-DREAL=double"),
    *(f"-Wl,--export={name}" for name in EXPORTS),
)


def has_compiler() -> bool:
    """Return whether ziglang is installed."""
    return importlib.util.find_spec("ziglang") is not None


def build(target: Path) -> None:
    """Compile step.c; the first time takes minutes, in which zig compiles the C library."""
    zig = (sys.executable, "-m", "ziglang")
    command = (*zig, "cc", *OPTIONS, str(compiler.FOLDER / SOURCE), "-o", str(target.resolve()))
    compiler.run(command, 3 * compiler.COMPILE_SECONDS)


def main() -> int:
    """Replace step.wasm and step.json in the package."""
    if not has_compiler():
        print("make explorer: expected the Python package ziglang, and it is not installed", file=sys.stderr)
        return 1
    target = FOLDER / "step.wasm"
    build(target)
    target.chmod(0o644)
    made = {
        "source": SOURCE,
        "sources_sha256": compiler.sources_digest(),
        "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        "compiler": "zig " + compiler.run((sys.executable, "-m", "ziglang", "version"), 60).decode().strip(),
        "options": " ".join(OPTIONS),
    }
    (FOLDER / "step.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size} bytes, sha256 {made['sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
