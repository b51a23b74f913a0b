"""Find a C compiler and run it.

Nothing here imports torch, so that the build hook of the wheel (`hatch_build.py`) compiles with the same flags.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path(__file__).with_name("csrc")
"""Where the C sources are."""

FLAGS = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-std=gnu11",
)
REALS = ("float", "double")
MANIFEST = "manifest.json"
"""Lists the prebuilt libraries of a wheel with their hashes, and the hash of the sources."""

COMPILE_SECONDS = 300


class CompilerError(RuntimeError):
    """There is no compiler, or it failed; the message says why."""


@functools.cache
def sources_digest() -> str:
    """Return a hash of all C sources and headers."""
    digest = hashlib.sha256()
    for name in sorted(x for x in os.listdir(FOLDER) if x.endswith((".c", ".h"))):
        text = (FOLDER / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def extra_flags() -> tuple[str, ...]:
    """Return the flags that a user adds by the variable MEMBYDESIGN_CFLAGS."""
    return tuple(shlex.split(os.environ.get("MEMBYDESIGN_CFLAGS", "")))


def flags() -> tuple[str, ...]:
    """Return the flags of every compilation."""
    return (*FLAGS, *extra_flags())


def find() -> tuple[str, ...]:
    """Return the command that runs the C compiler: that of the variable CC, with its arguments, or the system's."""
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        if command := _command(chosen):
            return command
        print(f"membydesign: CC: expected a program on PATH, got {chosen!r}; trying cc, gcc, clang", file=sys.stderr)
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return (path,)
    raise CompilerError("no C compiler was found")


def _command(text: str) -> tuple[str, ...] | None:
    if path := shutil.which(text):  # the path of a program may have spaces
        return (path,)
    try:
        program, *arguments = shlex.split(text, posix=os.name == "posix")
    except ValueError:  # a quote that does not end
        return None
    path = shutil.which(program)
    return (path, *arguments) if path else None


def identity(command: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when the compiler is replaced: path, size and time of each program in its command.

    Asking the compiler for its version would start a process at every first filter, as expensive as all the rest.
    """
    programs = (os.path.realpath(path) for path in map(shutil.which, command) if path)
    return tuple((path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in programs)


def compile_shared(command: tuple[str, ...], source: str, real: str, march: str, target: Path) -> None:
    """Compile a source for one floating-point type and one CPU into a library that brings OpenMP's runtime along."""
    run((*command, *_options(source, real, march), "-shared", "-o", str(target), "-lm"), COMPILE_SECONDS)


def compile_portable(command: tuple[str, ...], source: str, real: str, march: str, target: Path) -> None:
    """Compile a source into a library that takes OpenMP's functions from the process, where torch has loaded them.

    Linked without `-fopenmp`, the library names no OpenMP runtime that would have to be on the machine or in the wheel.
    """
    part = target.with_suffix(".o")
    run((*command, *_options(source, real, march), "-c", "-o", str(part)), COMPILE_SECONDS)
    run((*command, "-shared", "-s", "-o", str(target), str(part), "-lm"), COMPILE_SECONDS)
    part.unlink()


def prebuilt_name(source: str, real: str, level: str) -> str:
    """Return the file name of a prebuilt library."""
    return f"{source.removesuffix('.c')}-{real}-{level}.so"


def prebuild(folder: Path, levels: Iterable[str]) -> None:
    """Compile all sources for several levels of this architecture into a folder, with a manifest."""
    command = find()

    def compile_one(source: str, real: str, level: str) -> tuple[str, str]:
        path = folder / prebuilt_name(source, real, level)
        compile_portable(command, source, real, level, path)
        return path.name, hashlib.sha256(path.read_bytes()).hexdigest()

    sources = sorted(path.name for path in FOLDER.glob("*.c"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = dict(pool.map(compile_one, *zip(*product(sources, REALS, levels), strict=True)))
    manifest = {"sources": sources_digest(), "libraries": libraries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _options(source: str, real: str, march: str) -> tuple[str, ...]:
    return (*flags(), f"-march={march}", f"-DREAL={real}", str(FOLDER / source))


def run(command: tuple[str, ...], seconds: float) -> bytes:
    """Run a program and return its output; if it takes too long, end it and all its children."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a group of processes, which ends as one
    )
    try:
        out, error = process.communicate(timeout=seconds)
    except BaseException as interruption:
        _end(process)
        if isinstance(interruption, subprocess.TimeoutExpired):
            raise CompilerError(f"{command[0]} took longer than {seconds} seconds") from None
        raise
    if process.returncode:
        text = error.decode("utf-8", "replace").strip()
        raise CompilerError(text or f"{command[0]} ended with exit code {process.returncode}")
    return out


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)  # a child in a session of its own may keep the pipes open
