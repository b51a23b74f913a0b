"""Whatever is wrong with the machine, `library` returns None and warns once; it never raises."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fresh_native import load
from membydesign.filter.native import compiler as compiler_module

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers here are shell scripts")
SOURCE = "diagonal.c"
REAL_COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def library():
    """Load two sources, and return the first with all warnings of both."""
    (first, _), said = load(SOURCE, "step.c")
    return first, said


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Use a shell script as the compiler."""

    def install(script: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return path

    return install


def test_output_of_the_compiler_need_not_be_text(compiler):
    compiler(r"printf 'error: \377\376\n' >&2; exit 1")
    loaded, said = library()
    assert loaded is None
    assert len(said) == 1
    assert "could not be compiled: error: " in said[0]


def test_neither_home_nor_user(monkeypatch):
    """As in a container that runs under any user id."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", no_home)
    loaded, said = library()
    assert loaded is not None
    assert said == []


def test_the_c_locale(tmp_path):
    """C sources hold letters that are not ASCII, and so may the path of the cache."""
    program = f"""
import torch
from membydesign.filter.native import build
print(build.library("{SOURCE}", torch.float32) is not None)
"""
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "XDG_CACHE_HOME": str(tmp_path / "Zwischenspeicher ö"),
    }
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n", result.stderr


def test_a_compiler_with_arguments(tmp_path, monkeypatch):
    """CC="ccache gcc" runs ccache."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", f"{wrapper} {REAL_COMPILER}")
    loaded, said = library()
    assert loaded is not None
    assert said == []
    assert str(REAL_COMPILER) in (tmp_path / "calls").read_text()


def test_code_of_another_compiler_is_not_taken(compiler):
    """A library in the cache is found without starting the compiler, and no longer once the compiler was replaced."""
    log = compiler(f'echo "$@" >> "$(dirname "$0")/calls"; exec {REAL_COMPILER} "$@"').with_name("calls")
    load(SOURCE)
    compiled = len(log.read_text().splitlines())
    assert compiled == 1
    load(SOURCE)
    assert len(log.read_text().splitlines()) == compiled
    compiler(f'echo "$@" >> "$(dirname "$0")/calls"; exec {REAL_COMPILER} -g0 "$@"')
    load(SOURCE)
    assert len(log.read_text().splitlines()) == compiled + 1


def test_a_compiler_that_hangs_is_ended_with_its_children(compiler, tmp_path, monkeypatch):
    compiler(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setattr(compiler_module, "COMPILE_SECONDS", 1)
    start = time.monotonic()
    loaded, said = library()
    assert loaded is None
    assert time.monotonic() - start < 30
    assert len(said) == 1
    assert "took longer than 1 seconds" in said[0]
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
