"""The cache of compiled code: only whole files of this user or root are loaded, and one process compiles for all."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fresh_native import load
from membydesign.filter.native import cache as cache_module

SOURCE = "diagonal.c"
STRANGER = 54321
"""A user that does not exist."""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes of files")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


def new_process(place: Path) -> subprocess.Popen[str]:
    """Start a process that loads the source."""
    program = f"""
import torch
from membydesign.filter.native import build
print(build.library("{SOURCE}", torch.float32) is not None)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(place)},
    )


@pytest.fixture
def run(monkeypatch, capfd):
    """Load the source with this folder as cache, as a new process would; return what was said."""

    def load_with(place: Path) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        (library,), warned = load(SOURCE)
        assert library is not None, warned
        assert warned == []
        return capfd.readouterr().err

    return load_with


def age(path: Path, seconds: float) -> None:
    """Let a file look older."""
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def files(cache: Path, suffix: str = ".so") -> list[Path]:
    return sorted((cache / "membydesign").glob(f"*{suffix}"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with one library."""
    place = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        load(SOURCE)
    return place


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of it, for a test to damage."""
    (tmp_path / "membydesign").mkdir(mode=0o700)
    for path in files(filled):
        (tmp_path / "membydesign" / path.name).write_bytes(path.read_bytes())
    assert len(files(tmp_path)) == 1
    return tmp_path


def test_a_whole_library_is_loaded_again(cache, run):
    assert "compiling" not in run(cache)


@pytest.mark.parametrize("damage", ["empty", "truncated", "one bit"])
def test_a_damaged_library_is_compiled_again(cache, damage, run):
    """Truncated, it killed every process that loaded it; empty, everything was slow for ever."""
    (library,) = files(cache)
    data = bytearray(library.read_bytes())
    if damage == "one bit":
        data[len(data) // 2] ^= 1
    else:
        del data[0 if damage == "empty" else 5000 :]
    library.write_bytes(data)
    error = run(cache)
    assert "compiling" in error
    assert "filters through torch" not in error
    assert "compiling" not in run(cache)


@as_root
@pytest.mark.parametrize("foreign", ["file", "folder", "parent"])
def test_what_belongs_to_another_user_is_not_loaded(cache, foreign, run):
    path = {"file": files(cache)[0], "folder": cache / "membydesign", "parent": cache}[foreign]
    os.chown(path, STRANGER, STRANGER)
    assert "compiling" in run(cache)


def test_a_folder_that_others_can_write_to_is_not_trusted(cache, run):
    """Its library may have been replaced: it stays where it is, and the process compiles for itself."""
    with tempfile.TemporaryDirectory() as private:  # not below a folder of pytest's, which nobody else can enter
        shared = Path(private) / "shared"
        shutil.copytree(cache, shared)
        Path(private).chmod(0o755)
        shared.chmod(0o777)
        error = run(shared)
        assert "for this process only" in error
        assert f"others can write to {shared}" in error
        shared.chmod(0o1777)  # sticky: nobody else can rename what is in it
        assert "compiling" not in run(shared)
        shared.chmod(0o777)
        Path(private).chmod(0o700)  # nobody else can get there
        assert "compiling" not in run(shared)


def test_our_own_folder_is_closed_to_others(cache, run):
    """It was made under a loose umask; the library in it is still ours and whole."""
    (cache / "membydesign").chmod(0o777)
    assert "compiling" not in run(cache)
    assert stat.S_IMODE((cache / "membydesign").stat().st_mode) == 0o755


def test_a_library_that_others_can_write_to_is_not_loaded(cache, run):
    files(cache)[0].chmod(0o666)
    assert "compiling" in run(cache)
    assert stat.S_IMODE(files(cache)[0].stat().st_mode) == 0o644


@pytest.mark.parametrize("place", [".", "cache", ""])
def test_a_relative_cache_folder_is_ignored(cache, run, place, monkeypatch):
    """The XDG specification says so; otherwise code would be loaded from the working directory."""
    monkeypatch.chdir(cache)
    monkeypatch.setenv("HOME", str(cache / "home"))
    assert "once for this machine" in run(place)
    assert len(files(cache / "home" / ".cache")) == 1


def test_other_users_can_read_a_shared_cache(filled):
    (library,) = files(filled)
    assert stat.S_IMODE(library.stat().st_mode) == 0o644


@pytest.mark.slow
def test_eight_processes_compile_once(tmp_path):
    processes = [new_process(tmp_path) for _ in range(8)]
    results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert {out for out, _ in results} == {"True\n"}
    assert sum("compiling" in error for _, error in results) == 1
    assert [path.suffix for path in (tmp_path / "membydesign").iterdir()] == [".so"]


@pytest.fixture
def build_all(tmp_path):
    """Let several threads, each with open files of its own like a process, use one library; count the builds."""

    def ask(threads: int) -> int:
        built = []

        def build(target: Path, problem: str | None) -> None:
            assert problem is None
            built.append(target)
            time.sleep(0.2)
            target.write_bytes(b"code")

        def use(_: int) -> bytes:
            with cache_module.library("name", build) as path:
                return path.read_bytes()

        with ThreadPoolExecutor(threads) as pool:
            assert set(pool.map(use, range(threads))) == {b"code"}
        assert [path.suffix for path in (tmp_path / "membydesign").iterdir()] == [".so"]
        return len(built)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield ask


@pytest.mark.parametrize("locks", ["of the system", "unsupported", "absent"])
def test_one_builds_for_all(build_all, locks, monkeypatch):
    if locks == "absent":  # Windows
        monkeypatch.setattr(cache_module, "fcntl", None)
    elif locks == "unsupported":  # some network file systems

        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    assert build_all(8) == 1


@pytest.mark.parametrize("holder", ["stuck", "crashed without locks"])
def test_a_lock_does_not_block_for_ever(build_all, tmp_path, holder, monkeypatch):
    monkeypatch.setattr(cache_module, "LOCK_SECONDS", 0.3)
    folder = cache_module.folder()
    if holder == "stuck":
        with cache_module.locked(folder / "name.lock"):
            start = time.monotonic()
            with cache_module.locked(folder / "name.lock"):
                assert 0.3 <= time.monotonic() - start < 5
    else:
        monkeypatch.setattr(cache_module, "fcntl", None)
        (folder / "name.lock").touch()
        age(folder / "name.lock", 1)
        assert build_all(1) == 1


def test_partial_files_of_a_crashed_process_are_removed(tmp_path, run):
    folder = tmp_path / "membydesign"
    folder.mkdir(mode=0o700)
    stale, fresh = folder / "tmpabcdefgh.partial", folder / "tmpijklmnop.partial"
    stale.touch()
    fresh.touch()
    age(stale, 86400)
    run(tmp_path)
    assert not stale.exists()
    assert fresh.exists()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, run):
    """A file in the place of the folder stands for any error; root can write everywhere."""
    (tmp_path / "membydesign").touch()
    first, second = run(tmp_path), run(tmp_path)
    assert "for this process only" in first
    assert "for this process only" in second
    assert "filters through torch" not in first
