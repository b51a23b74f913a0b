"""Lock a run folder, so that two processes never write the same run.

The operating system holds the lock (`flock`, or a region lock on Windows) and releases it when the process ends,
however it ends. File systems without such locks get a file that names its process instead, which counts as released
once that process has ended.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK = ".lock"
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""Errors of file systems that have no locks."""
RETRY_SECONDS = 0.05


class FolderInUse(RuntimeError):
    """Another process, or another thread, uses a run folder; or the folder cannot be locked."""


class _Held:
    """A lock of this process: the descriptor that holds it, and the thread that may take it again."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor, self.thread, self.count = descriptor, threading.get_ident(), 1


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


def _forget_in_child() -> None:
    """Close the descriptors that a forked process inherits: it must not keep the lock after its parent has ended."""
    for held in _held.values():
        if held.descriptor is not None:
            with suppress(OSError):
                os.close(held.descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def locked(directory: Path | None, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing. The same thread may take it again.

    Args:
        directory: folder to lock; None to lock nothing, in processes that do not write.
        patience: seconds to wait for another process to release it.

    Raises:
        FolderInUse: if another process or thread holds the lock, or if the file system refuses the file.
    """
    if directory is None:
        yield
        return
    path = directory.resolve() / LOCK
    _take(path, directory, patience)
    try:
        yield
    finally:
        _release(path)


def _take(path: Path, directory: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        with _guard:
            held = _held.get(path)
            if held is not None and held.thread == threading.get_ident():
                held.count += 1
                return
            try:
                directory.mkdir(parents=True, exist_ok=True)
                acquired = None if held is not None else _acquired(path)
            except OSError as error:
                reason = error.strerror or str(error)
                raise FolderInUse(f"{directory}: expected a folder that can be written, got: {reason}") from error
            if acquired is not None:
                _held[path] = acquired
                return
        if time.monotonic() >= deadline:
            raise FolderInUse(
                f"{directory}: expected a folder that no other process uses, and {_described(path)} writes to it; "
                "wait until it has ended or stop it, and rerun the same command to resume; or choose another folder"
                f"{_if_abandoned(path)}"
            )
        time.sleep(RETRY_SECONDS)


def _release(path: Path) -> None:
    with _guard:
        held = _held.get(path)
        if held is None:  # in a forked process, which does not hold the lock
            return
        held.count -= 1
        if held.count:
            return
        del _held[path]
        with suppress(OSError):  # the folder may be gone
            path.unlink()  # before the lock is released, so that nobody else's file is removed
        if held.descriptor is not None:
            os.close(held.descriptor)


def _acquired(path: Path) -> _Held | None:
    """Try to lock the file; return None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock(descriptor):
                os.close(descriptor)
                return None
            if not _is_at(path, descriptor):  # its last holder has removed it since we opened it
                os.close(descriptor)
                continue
            os.truncate(descriptor, 0)
            os.write(descriptor, _about_us())
        except OSError as error:
            os.close(descriptor)
            if error.errno in UNSUPPORTED:
                return _acquired_by_name(path)
            raise
        return _Held(descriptor)


def _acquired_by_name(path: Path) -> _Held | None:
    """Lock by a file that names this process, where the file system has no locks."""
    for _ in range(3):
        holder = _holder(path)
        if holder and _may_live(holder):
            return None
        with suppress(FileNotFoundError):
            path.unlink()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # another process was faster
            continue
        about = _about_us()
        try:
            os.write(descriptor, about)
        finally:
            os.close(descriptor)
        if _holder(path) == json.loads(about):  # another process may have taken our file for an abandoned one
            return _Held(None)
    return None


def _lock(descriptor: int) -> bool:
    """Lock an open file without waiting; return False if another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # beyond the text, which others may then read
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        os.lseek(descriptor, 0, os.SEEK_SET)
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _about_us() -> bytes:
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"pid": os.getpid(), "host": platform.node(), "since": since, "ticks": _ticks(os.getpid())}
    return json.dumps(about).encode()


def _holder(path: Path) -> dict[str, Any]:
    """Read who holds a lock; empty if the file does not say."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else {}


def _described(path: Path) -> str:
    holder = _holder(path)
    if not holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"


def _if_abandoned(path: Path) -> str:
    """Say what to do about a lock whose process cannot be seen from here."""
    elsewhere = _holder(path).get("host") not in (None, platform.node())
    return f"; if that process has ended, remove {path}" if elsewhere else ""


def _may_live(holder: dict[str, Any]) -> bool:
    """Whether a process may still run: on another computer nobody can tell."""
    if holder.get("host") != platform.node() or sys.platform == "win32":
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    # Another process may have the number by now, which started at another time.
    return holder.get("ticks") is None or _ticks(holder["pid"]) == holder["ticks"]


def _ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since the computer did; None if unknown, or if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
