"""Compiled libraries on disk: shared by all processes of a user, and never loaded unless they are whole and ours.

A library is stored as `<name>-<hash of its bytes>.so`. The hash is checked before loading, because a truncated library
kills the process. Whoever can write to the folder can run code in every process that loads from it, so the folder, all
its parents and the file must belong to the user or to root, and nobody else may be able to write to them. Where there
is no such folder, a library lives in a private temporary folder until it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOCK_SECONDS = 300.0
"""How long to wait for another process that compiles the same library, which is as long as that may take."""
STALE_SECONDS = 600.0
"""The age from which on an unfinished file is one of a process that crashed; writing one takes milliseconds."""
_DIGITS = 32


class CacheError(RuntimeError):
    """There is no folder to keep libraries in; the message says why."""


def folder() -> Path:
    """Return the folder of compiled libraries, which is created if necessary and safe to load from.

    Raises:
        CacheError: it cannot be created, or others could write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which the XDG specification says to ignore
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError as error:  # neither HOME nor an entry of this user
            raise CacheError(str(error)) from None
    if not os.path.isabs(base):
        raise CacheError(f"HOME: expected an absolute path, got {os.environ.get('HOME')!r}")
    try:
        path = Path(os.path.realpath(base)) / "membydesign"
        _create(path)
        path = Path(os.path.realpath(path))
        if hasattr(os, "geteuid") and path.stat().st_uid == os.geteuid() and path.stat().st_mode & 0o022:
            path.chmod(path.stat().st_mode & 0o755)  # made under a loose umask; files in it are checked one by one
        reason = why_unsafe(path)
    except OSError as error:
        raise CacheError(str(error)) from None
    if reason:
        raise CacheError(reason)
    return path


def _create(path: Path) -> None:
    if not path.exists():
        for parent in reversed(path.parents):
            with contextlib.suppress(FileExistsError):
                if not parent.exists():
                    parent.mkdir(mode=0o700)
        path.mkdir(mode=0o755, exist_ok=True)  # others may read it, for caches that root fills for everybody
    if not path.is_dir():
        raise NotADirectoryError(f"expected a folder, got a file: {path}")


def why_unsafe(path: Path) -> str | None:
    """Return why others could replace what is in a folder, given without symbolic links; None if they cannot."""
    if not hasattr(os, "geteuid"):
        return None  # Windows, where a user's profile is private
    us, unmapped, reachable = os.geteuid(), _unmapped_user(), True
    for place in (*reversed(path.parents), path):
        status = place.stat()
        # The owner of a parent could put another folder in the place of ours, but it would have the wrong owner.
        if status.st_uid not in (0, us) and (place == path or status.st_uid != unmapped):
            return f"{place} belongs to user {status.st_uid}, expected this user or root"
        writable = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _only_member(status.st_gid))
        # In a sticky folder nobody can rename or remove what belongs to somebody else.
        if reachable and writable and (place == path or not status.st_mode & stat.S_ISVTX):
            return f"others can write to {place} (chmod go-w changes that)"
        if status.st_uid == us and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            reachable = False  # nobody else gets to what is below
    return None


def _unmapped_user() -> int | None:
    """Return the user id that stands for all unknown ones inside a user namespace, as in rootless containers."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_bytes())
    except (OSError, ValueError):
        return None


def _only_member(group: int) -> bool:
    """Return whether a group is the user's private one, as many systems make for each user."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


@contextlib.contextmanager
def library(name: str, build: Callable[[Path, str | None], None], keep: bool = True) -> Iterator[Path]:
    """Provide a compiled library: from the cache, or built now and kept there if possible.

    Args:
        name: says what the library was built from and for; a file name without suffix.
        build: writes the library to a path; it is also told why it is built for this process only, or None.
        keep: whether other processes may use the library.
    """
    where, problem = None, "this CPU cannot be identified"
    if keep:
        try:
            where, problem = folder(), None
        except CacheError as error:
            problem = str(error)
    with contextlib.ExitStack() as stack:
        path = where and find(where, name)
        if path is None:
            if where is not None:
                stack.enter_context(locked(where / f"{name}.lock"))
                path = find(where, name)  # by the process that had the lock
            if path is None:
                path = _build(name, build, where, problem, stack)
        yield path


def _build(
    name: str,
    build: Callable[[Path, str | None], None],
    where: Path | None,
    problem: str | None,
    stack: contextlib.ExitStack,
) -> Path:
    if where is not None and not os.access(where, os.W_OK):
        where, problem = None, f"{where} cannot be written to"
    temporary = tempfile.TemporaryDirectory(prefix="membydesign-", ignore_cleanup_errors=True)
    private = Path(os.path.realpath(stack.enter_context(temporary)))
    if reason := why_unsafe(private):
        raise CacheError(reason)
    built = private / f"{name}.so"
    build(built, problem)
    if where is not None:
        with contextlib.suppress(OSError):  # a full disk, say: then it serves this process alone
            return store(where, name, built.read_bytes())
    return built


def find(where: Path, name: str) -> Path | None:
    """Return a library of this name that is whole and ours; remove damaged ones."""
    # not Path.glob, whose patterns take longer to compile than the files to read
    for path in sorted(where / x for x in os.listdir(where) if x.startswith(f"{name}-") and x.endswith(".so")):
        try:
            with open(path, "rb", opener=_without_links) as file:
                status, data = os.fstat(file.fileno()), file.read()
            ours = not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())
            if not ours or not stat.S_ISREG(status.st_mode) or (os.name == "posix" and status.st_mode & 0o022):
                continue
            if path.name == _file_name(name, data):
                return path
            path.unlink()
        except OSError:  # removed meanwhile, or not for us to read
            continue
    return None


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _file_name(name: str, data: bytes) -> str:
    return f"{name}-{hashlib.sha256(data).hexdigest()[:_DIGITS]}.so"


def store(where: Path, name: str, data: bytes) -> Path:
    """Write a library into the folder: completely or not at all, even if the machine loses power."""
    _remove_stale(where)
    path = where / _file_name(name, data)
    handle, partial = tempfile.mkstemp(dir=where, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # readable where root fills a cache for everybody
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every system can open a folder
        descriptor = os.open(where, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return path


def _remove_stale(where: Path) -> None:
    for path in where.iterdir():
        with contextlib.suppress(OSError):
            if path.suffix in (".partial", ".lock", ".building") and time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, or go on without it: after `LOCK_SECONDS`, or where there are no locks.

    The system releases the lock of a process that crashed. File systems without such locks have a file that exists
    while the lock is held; it is removed by others when it is older than `LOCK_SECONDS`.
    """
    deadline, take, release = time.monotonic() + LOCK_SECONDS, _take_lock if fcntl else _take_file, None
    while release is None and time.monotonic() < deadline:
        try:
            release = take(path)
        except OSError:
            if take is _take_file:
                break  # a folder that cannot be written to
            take, path = _take_file, path.with_suffix(".building")
        else:
            if release is None:
                time.sleep(0.05)
    try:
        yield
    finally:
        if release is not None:
            with contextlib.suppress(OSError):
                release()


def _take_lock(path: Path) -> Callable[[], None] | None:
    assert fcntl is not None
    file = open(path, "ab")  # noqa: SIM115 - open as long as the lock is held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        path.unlink(missing_ok=True)
        raise

    def release() -> None:
        path.unlink(missing_ok=True)  # who has it open still gets the lock, and finds the library
        file.close()

    return release


def _take_file(path: Path) -> Callable[[], None] | None:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LOCK_SECONDS:
                path.unlink()
        return None
    return lambda: path.unlink(missing_ok=True)
