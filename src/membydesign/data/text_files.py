"""Read documents from local files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from membydesign.data.splitting import SPLITTERS, check_cut
from membydesign.data.text import Corpus
from membydesign.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIXES = (".txt", ".tokens", ".json", ".jsonl")
"""Supported file types: plain text, and JSON with a column of text."""

WIKITEXT = "wiki.*.tokens"
"""File names of the original WikiText release."""


@final
@dataclass(frozen=True)
class TextFiles(Corpus):
    r"""A file, or all supported files in a folder and its subfolders, sorted by path.

    | file | text |
    |---|---|
    | `*.txt`, `*.tokens` | its contents in UTF-8; `\r\n` is kept, a byte order mark is removed |
    | `*.json` | one object with a column of text, or a list of such objects or of strings |
    | `*.jsonl` | one such object per line |

    Attributes:
        path: file or folder.
        cut: "whole" makes every file or JSON object a document, "articles" splits WikiText. None chooses articles for
            files named `wiki.*.tokens` and whole files otherwise.
        column: key of the text in JSON objects.
    """

    path: Path
    cut: str | None = None
    column: str = "text"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise ValueError(f"path: expected a file or folder, got {self.path!r}")
        object.__setattr__(self, "path", Path(self.path))
        if not isinstance(self.column, str) or not self.column:
            raise ValueError(f"column: expected a name, got {self.column!r}")
        check_cut(self.cut)

    def files(self) -> list[Path]:
        """Return the files to read, in order."""
        path = self.path
        if path.is_file():
            if path.suffix not in SUFFIXES:
                raise ValueError(f"path: expected a file {_patterns()}, got {path}")
            return [path]
        if not path.is_dir():
            raise ValueError(f"path: expected a file or folder of text, and there is no {path}")
        files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files:
            raise ValueError(f"path: expected files {_patterns()} in a folder, and {path} has none")
        return sorted(files, key=lambda file: file.relative_to(path).parts)

    def cut_of(self, file: Path) -> str:
        """Return the name of the splitter for a file."""
        return self.cut or ("articles" if fnmatchcase(file.name, WIKITEXT) else "whole")

    def describe(self) -> dict[str, Any]:
        """Describe the number of files, how they are split, and a hash of their contents; paths do not matter."""
        files = self.files()
        digest = hashlib.sha256()
        for file in files:
            inside = hashlib.sha256()
            with file.open("rb") as content:
                while block := content.read(2**20):
                    inside.update(block)
            digest.update(f"{self.cut_of(file)} {file.suffix} {inside.hexdigest()}\n".encode())
        return {
            "kind": "files",
            "files": len(files),
            "bytes": sum(file.stat().st_size for file in files),
            "cut": dict(sorted(Counter(map(self.cut_of, files)).items())),
            "column": self.column,
            "sha256": digest.hexdigest(),
        }

    def documents(self) -> Iterator[str]:
        """Yield the documents, file by file."""
        any_text = False
        for file in self.files():
            for document in SPLITTERS[self.cut_of(file)](self._pieces(file)):
                any_text = True
                yield document
        if not any_text:
            raise ValueError(f"path: expected text in {self.path}, got blank files only")

    def _pieces(self, file: Path) -> Iterator[str]:
        text = _read(file)
        if file.suffix == ".json":
            value = _parse(text, str(file))
            for i, item in enumerate(value if isinstance(value, list) else [value]):
                yield self._text(item, f"item {i + 1} of {file}")
        elif file.suffix == ".jsonl":
            # Split at "\n" only: JSON strings may contain other line separators, at which `splitlines` would split.
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    where = f"{file}, line {number}"
                    yield self._text(_parse(line, where), where)
        else:
            yield text

    def _text(self, item: Any, where: str) -> str:
        text = item.get(self.column) if isinstance(item, dict) else item
        if isinstance(text, str):
            return text
        got = f"columns {', '.join(map(str, item))}" if isinstance(item, dict) else type(item).__name__
        raise ValueError(f"column: expected text in the column {self.column!r} of {where}, got {got}")


def _patterns() -> str:
    return " or ".join(f"*{suffix}" for suffix in SUFFIXES)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"path: expected text in UTF-8, got invalid UTF-8 at byte {error.start} of {file}; "
            "convert it, for example with iconv -f latin1 -t utf-8"
        ) from None


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"path: expected JSON in {where}, got invalid JSON: {error}") from None
