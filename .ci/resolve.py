"""Check that what `make test` installs resolves from a plain package index for every supported Python and platform.

The resolver sees no wheel folder, extra index or configuration of this machine, and only wheels, so the check fails
here if it would fail for somebody else. It reads metadata and installs nothing. `--write` renews the pinned versions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")
SHOWN = ("torch", "triton", "transformers", "numpy")
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements-dev.txt"
HEADER = "# Written by `make lock` for Python 3.10 to 3.14 on every platform. "


def main() -> int:
    """Print a row for each Python; the exit code says whether everything resolved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write constraints.txt and requirements-dev.txt")
    parser.add_argument("--upgrade", action="store_true", help="with --write: take the newest versions")
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.upgrade)
    failures = disagreements()
    pinned = {name for name, _ in pins(CONSTRAINTS.read_text())}
    print(f"{'python':8}{'platform':28}{'packages':>8}  " + "  ".join(f"{name:14}" for name in SHOWN))
    cases = list(product(PLATFORMS, PYTHONS))
    with ThreadPoolExecutor(5) as pool:  # it waits for the index most of the time
        for (platform, python), (code, text) in zip(cases, pool.map(resolve, cases), strict=True):
            actual = dict(pins(text)) if code == 0 else {}
            loose = sorted(set(actual) - pinned)
            if code or loose:
                reason = f"not pinned: {', '.join(loose)}" if loose else text.strip()
                failures.append(f"Python {python} on {platform}: {reason}")
            versions = "  ".join(f"{actual.get(name, '-'):14}" for name in SHOWN)
            print(f"{python:8}{platform:28}{len(actual) or 'fails':>8}  {versions}".rstrip(), flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


def write(upgrade: bool) -> None:
    """Pin all packages of `.[dev,evaluation]` for pip's --constraint, and those of `.[dev]` with hashes.

    The file with hashes verifies every byte. The other also admits another build of the same version, such as PyTorch's
    CPU build.
    """
    upgraded = ["--upgrade"] if upgrade else []
    universal = ["--universal", "--python-version", PYTHONS[0]]
    chosen = ["-c", "constraints.in", "--extra", "evaluation", *upgraded]
    for file, options, line in (
        (CONSTRAINTS, chosen, "What the Makefile installs; pyproject.toml has the ranges."),
        (LOCK, ["-c", "constraints.txt", "--generate-hashes"], "pip install --require-hashes -r requirements-dev.txt"),
    ):
        code, text = compile_requirements(*universal, *options, "--output-file", str(file))
        if code:
            sys.exit(text)
        file.write_text(HEADER + line + "\n" + file.read_text())


def resolve(case: tuple[str, str]) -> tuple[int, str]:
    """Resolve `.[dev]` with the constraints for one platform and Python, from wheels alone."""
    platform, python = case
    target = ["--python-version", python, "--python-platform", platform]
    return compile_requirements(*target, "--no-build", "-c", "constraints.txt")


def compile_requirements(*options: str) -> tuple[int, str]:
    """Run `uv pip compile` on pyproject.toml with the extra dev, as on a machine with no configuration."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    environment["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # the oldest macOS that torch has wheels for
    command = ["uv", "--no-config", "pip", "compile", "pyproject.toml", "--extra", "dev", *options]
    command += ["--quiet", "--no-header", "--no-annotate"]
    # uv is a package of the development environment, whose interpreter runs this file.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr if result.returncode else result.stdout


def pins(text: str) -> list[tuple[str, str]]:
    """Every `name==version` that starts a line."""
    return re.findall(r"^([a-z0-9-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)


def disagreements() -> list[str]:
    """Versions in the file with hashes that the other file does not have."""
    differing = sorted(set(pins(LOCK.read_text())) - set(pins(CONSTRAINTS.read_text())))
    return [f"{LOCK.name}: expected the versions of {CONSTRAINTS.name}, got {differing}"] if differing else []


if __name__ == "__main__":
    raise SystemExit(main())
