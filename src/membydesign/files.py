"""Read JSON, and write files atomically, in folders that others may write to as well.

Nothing here follows a symbolic link that somebody else could have placed: temporary files are new files with names that
cannot be guessed, and files that are read for a report must lie in the folder of the result.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTIAL = ".partial"
"""Ending of files and folders that are not complete yet."""

# Windows has no O_NOFOLLOW, and converts line ends without O_BINARY.
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


HUB = "hub:"
"""Prefix of names on the Hugging Face Hub, where they could be mistaken for folders."""

_HUB_NAME = r"[\w-][\w.-]*"


def hub_name(argument: str, source: str | os.PathLike[str]) -> str | None:
    """Return the name on the Hugging Face Hub that a model or tokenizer is given by, or None if it is a folder.

    OWNER/NAME is a name on the Hub, unless OWNER is a folder here; `hub:NAME` and `hub:OWNER/NAME` always are.

    Raises:
        ValueError: if it is neither; nothing is looked for on the Hub, which could take minutes without a network.
    """
    text = os.fspath(source)
    name, path = text.removeprefix(HUB), Path(text)
    if name != text:
        if not re.fullmatch(f"{_HUB_NAME}(/{_HUB_NAME})?", name):
            raise ValueError(f"{argument}: expected {HUB}NAME or {HUB}OWNER/NAME, got {text!r}")
        return name
    if text and path.is_dir():
        return None
    if text and path.exists():
        raise ValueError(f"{argument}: expected a folder or a name on the Hugging Face Hub, and {text!r} is a file")
    if not re.fullmatch(f"{_HUB_NAME}/{_HUB_NAME}", text) or path.parent.is_dir():
        raise ValueError(
            f"{argument}: expected a folder or a name on the Hugging Face Hub, got no such folder {text!r}; "
            f"on the Hub, a name is OWNER/NAME, or {HUB}NAME if it has no owner or looks like a folder"
        )
    return text


def to_json(value: Any) -> str:
    """Format a value as JSON, as in all commands and files of this package."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; whatever is wrong with it is a ValueError, also nesting that exceeds Python's recursion limit."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def read_json(path: Path) -> Any:
    """Read a JSON file; raises a ValueError that names the file, or an OSError if it cannot be opened."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object; raises as `read_json`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def open_partial(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file next to `path` under a name that cannot be guessed; return it, open for writing, and its path."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o666)
    return os.fdopen(handle, "wb"), partial


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`, and move it there if the block succeeds; otherwise remove it.

    The file is a new one that no other process knows, so neither a link nor a second writer can interfere. A link at
    `path` is replaced, not followed.
    """
    file, partial = open_partial(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: completely or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def append_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Append to a file, or start it; a symbolic link raises an OSError.

    Args:
        path: file to extend.
        text: text to append.
        sync: whether to wait until it is on the disk.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINKS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path}: expected a regular file, got a symbolic link; remove it") from None
        raise
    with os.fdopen(handle, "ab") as file:
        file.write(text.encode())
        if sync:
            file.flush()
            os.fsync(file.fileno())


def partial_folder(folder: Path) -> Path:
    """Create an empty folder next to `folder`, to be filled and moved there; what is left of an earlier one is removed.

    A link of its name is removed, not followed.
    """
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    if partial.is_symlink() or partial.is_file():
        partial.unlink()
    else:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder to fill; it replaces `folder` if the block succeeds, and is removed otherwise."""
    partial = partial_folder(folder)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_inside(path: Path, folder: Path) -> Path:
    """Return `path` if the file is in `folder`, also through links; raise a ValueError if a link leads out of it."""
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(folder)):
        raise ValueError(f"{path}: expected a file in {folder}, got a link to {target}")
    return path
