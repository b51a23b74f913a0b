"""Text in local files."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from membydesign.data.cuts import CUTS, check_cut
from membydesign.data.text import Corpus

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIXES = (".txt", ".tokens", ".json", ".jsonl")
"""Files that are read: plain text, and JSON whose text is in a column."""

WIKITEXT = "wiki.*.tokens"
"""The names of WikiText's own files."""


@final
@dataclass(frozen=True)
class TextFiles(Corpus):
    r"""A file, or all files of a folder and of the folders in it, by their paths.

    | file | its text |
    |---|---|
    | `*.txt`, `*.tokens` | as it stands, in UTF-8; `\r\n` is not changed, and a byte order mark is left out |
    | `*.json` | one object with a column of text, or a list of such objects or of texts |
    | `*.jsonl` | such an object on every line |

    Attributes:
        path: of the file or folder.
        cut: "whole", a document for each file or object of JSON, or "articles" of WikiText. None takes articles for
            files named `wiki.*.tokens`, and whole files for all others.
        column: where the objects of JSON have their text.
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
        """The files that are read, in their order."""
        path = self.path
        if path.is_file():
            if path.suffix not in SUFFIXES:
                raise ValueError(f"path: expected a file {_patterns()}, got {path}")
            return [path]
        if not path.is_dir():
            raise ValueError(f"path: expected a file or folder of text, and there is no {path}")
        found = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not found:
            raise ValueError(f"path: expected files {_patterns()} in a folder, and {path} has none")
        return sorted(found, key=lambda file: file.relative_to(path).parts)

    def cut_of(self, file: Path) -> str:
        """How a file is cut into documents."""
        return self.cut or ("articles" if fnmatchcase(file.name, WIKITEXT) else "whole")

    def describe(self) -> dict[str, Any]:
        """How many files are cut in which way, and a hash of their contents; where they lie does not count."""
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
        """The documents, file by file."""
        some = False
        for file in self.files():
            for document in CUTS[self.cut_of(file)](self._pieces(file)):
                some = True
                yield document
        if not some:
            raise ValueError(f"path: expected some text, and what is in {self.path} is blank")

    def _pieces(self, file: Path) -> Iterator[str]:
        text = _read(file)
        if file.suffix == ".json":
            value = _parse(text, str(file))
            for i, item in enumerate(value if isinstance(value, list) else [value]):
                yield self._text(item, f"item {i + 1} of {file}")
        elif file.suffix == ".jsonl":
            # Only "\n" ends a line: JSON may hold other line ends, which `splitlines` would cut at.
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
            f"path: expected text in UTF-8, and {file} is none at byte {error.start}; "
            "convert it, for example with iconv -f latin1 -t utf-8"
        ) from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"path: expected JSON in {where}, and it cannot be read: {error}") from None
