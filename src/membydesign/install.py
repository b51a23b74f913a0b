"""The pip command that hints and errors recommend.

The package is not on a package index, so the command must name where this copy was installed from. Installers record
that (PEP 610, `direct_url.json`): a checkout, a wheel file or a Git URL. A copy from an index has no such record.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "memory-by-design"
CHECKOUT = f"/path/to/{NAME}"
"""Placeholder for a checkout in the docs, and in messages read on other machines."""


def install_hint(extra: str = "") -> str:
    """Return the command that installs this copy of the package with an extra.

    Examples:
        >>> install_hint("models")  # doctest: +SKIP
        "pip install '/home/me/memory-by-design[models]'"
    """
    return _command(*_source(), extra)


def portable_install_hint(extra: str = "") -> str:
    """Return the same command for a message read on another machine, without local paths."""
    source, editable = _source()
    return _command(CHECKOUT, False, extra) if _is_path(source) else _command(source, editable, extra)


def source_folder(package: Path | None = None) -> Path | None:
    """Return the checkout that the running package lies in or was installed from; None if it is not there.

    The working directory does not count: it may belong to somebody else.
    """
    package, (source, _) = package or Path(__file__).resolve().parent, _source()
    candidates = [package.parents[1]] if package.parent.name == "src" else [Path(source)] if _is_path(source) else []
    return next((each for each in candidates if (each / "pyproject.toml").is_file()), None)


def _source() -> tuple[str, bool]:
    """Return what pip installs, and whether it is an editable install."""
    try:
        record = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # imported from a checkout that is not installed
        return str(Path(__file__).resolve().parents[2]), True
    if record is None:
        return NAME, False
    origin = json.loads(record)
    url, version_control = origin["url"], origin.get("vcs_info")
    if version_control:
        revision = version_control.get("requested_revision")
        return f"{version_control['vcs']}+{url}" + (f"@{revision}" if revision else ""), False
    if urlsplit(url).scheme == "file":
        return url2pathname(urlsplit(url).path), bool(origin.get("dir_info", {}).get("editable"))
    return url, False


def _is_path(source: str) -> bool:
    return source != NAME and not urlsplit(source).scheme.startswith(("http", "git", "hg", "svn", "bzr"))


def _command(source: str, editable: bool, extra: str) -> str:
    extras = f"[{extra}]" if extra else ""
    requirement = f"{source}{extras}" if source == NAME or _is_path(source) else f"{NAME}{extras} @ {source}"
    return f"pip install {'--editable ' if editable else ''}{shlex.quote(requirement)}"
