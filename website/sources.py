"""Collect the pages of the site: docs/, pages made from the code, and files of the repository that they link to."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from functools import cache
from typing import TYPE_CHECKING

from website import DOCS, ROOT
from website.generated import pages

if TYPE_CHECKING:
    from pathlib import Path

REPOSITORY = "repository"
"""The folder of the site that holds files of the repository, as they are."""

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_PICTURES = (".png", ".svg", ".jpg")
_LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".json": "json", ".yml": "yaml", ".toml": "toml"}


@cache
def generated() -> dict[str, str]:
    """Return the pages made from the code, by their path below docs/."""
    return pages()


def exists(page: Path, target: str) -> bool:
    """Whether a link of a page of the repository leads to a file of it, or to a page made from the code."""
    path = _resolved(page.relative_to(ROOT).as_posix(), target.partition("#")[0])
    return (ROOT / path).exists() or path.removeprefix("docs/") in generated()


def stage(folder: Path) -> None:
    """Write all pages and pictures below `folder`; links to files of the repository then lead to copies of them."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        if path.is_file() and path.suffix != ".md":
            _copy(path, folder / path.relative_to(DOCS))
    waiting = [(f"docs/{name}", name) for name in generated()]
    waiting += [(path.relative_to(ROOT).as_posix(), path.relative_to(DOCS).as_posix()) for path in DOCS.rglob("*.md")]
    done = {source for source, _ in waiting}
    while waiting:
        source, name = waiting.pop()
        text = generated().get(name) if source.startswith("docs/") else None
        path = ROOT / source
        if text is None and path.suffix in _PICTURES:
            _copy(path, folder / name)
            continue
        found: list[tuple[str, str]] = []
        if path.is_dir():
            text = _listed(path)
        elif text is None and path.suffix != ".md":
            text = _shown(source, path.read_text(encoding="utf-8"))
        elif name.endswith(".md"):
            text, found = with_links(text or path.read_text(encoding="utf-8"), source, name)
            text = text if source.startswith("docs/") else _OUTSIDE + text
        waiting += [(other, place) for other, place in found if other not in done]
        done |= {other for other, _ in found}
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text or "", encoding="utf-8")


_OUTSIDE = "---\nsearch:\n  exclude: true\nhide:\n  - navigation\n---\n\n"


def _shown(source: str, text: str) -> str:
    """Return a page with a file of the repository on it."""
    language = _LANGUAGES.get(posixpath.splitext(source)[1], "text")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{_OUTSIDE}# {posixpath.basename(source)}\n\n`{source}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _listed(folder: Path) -> str:
    """Return a page with the names of the files in a folder of the repository."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    lines = [f"# {folder.name}\n", f"`{folder.relative_to(ROOT).as_posix()}/`\n", *(f"- `{name}`" for name in names)]
    return _OUTSIDE + "\n".join(lines) + "\n"


def with_links(text: str, source: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    """Lead links to where the site has their targets; also return the files that are still to be written."""
    found: list[tuple[str, str]] = []

    def led(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = _resolved(source, target)
        place = _place(path)
        if place is None:
            raise ValueError(f"{source}: expected a link to a file of the repository, got {match[2]}")
        if not path.startswith("docs/"):
            found.append((path, place))
            if not path.endswith(".md"):
                hash_sign = anchor = ""
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(name) or '.')}{hash_sign}{anchor})"

    pieces, end = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(led, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(led, text[end:])]), found


def _place(path: str) -> str | None:
    """Return where the site has a file of the repository, or None if there is no such file."""
    if path.startswith("docs/"):
        name = path.removeprefix("docs/")
        return name if name in generated() or (ROOT / path).is_file() else None
    if not (ROOT / path).exists():
        return None
    name = re.sub(r"(^|/)\.(?=\w)", r"\1", path)  # the builder leaves out hidden folders
    return f"{REPOSITORY}/{name}" if path.endswith((".md", *_PICTURES)) else f"{REPOSITORY}/{name}.md"


def _resolved(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _copy(path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)
    os.utime(place, (path.stat().st_atime, path.stat().st_mtime))
