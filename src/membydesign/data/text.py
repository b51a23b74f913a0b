"""Corpora of documents: from the Hugging Face Hub, from files, or Python's own help, which every machine has.

A corpus describes itself (`describe`; token files store this in their header) and yields its documents one by one
(`documents`). Its field `cut` names how text is split into documents: "whole", or WikiText's "articles".
"""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, final

from membydesign.data.splitting import SPLITTERS, check_cut
from membydesign.errors import check_whole_number
from membydesign.files import HUB
from membydesign.install import install_hint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SHARED_WORDS = 12
"""Two texts that share this many consecutive words are taken to overlap."""


class Corpus(ABC):
    """A collection of documents that can describe itself."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe the corpus in JSON types; equal for the same documents, different for others."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield the documents, always in the same order and never blank.

        Raises:
            ValueError: if the documents cannot be read, or if there are none.
        """


def need(package: str, purpose: str) -> ModuleType:
    """Import a package of the extra `text`; if it is missing, the error says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(f"{purpose} needs {package}: {install_hint('text')}", name=package) from error


@final
@dataclass(frozen=True)
class HubText(Corpus):
    """A dataset on the Hugging Face Hub, streamed: only what is read is downloaded.

    Attributes:
        name: name on the Hub, for example "Salesforce/wikitext"; or a local folder that `datasets` can load.
        config: configuration of the dataset, for example "wikitext-103-v1".
        split: "train", "validation", "test" or another split of the dataset.
        column: column of text.
        cut: "whole" makes every row a document; "articles" splits WikiText, whose rows are lines. None chooses by name.
        revision: branch, tag or commit. None reads the latest revision, which may change.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    cut: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        for field in ("name", "split", "column"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{field}: expected a name, got {value!r}")
        check_cut(self.cut)

    @property
    def cut_by(self) -> str:
        """Name of the function that splits rows into documents."""
        return self.cut or ("articles" if self.name.rpartition("/")[2].lower() == "wikitext" else "whole")

    def describe(self) -> dict[str, Any]:
        """Describe the dataset by its names only, without contacting the Hub."""
        return {
            "kind": "dataset",
            "name": self.name,
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "cut": self.cut_by,
            "revision": self.revision,
        }

    def documents(self) -> Iterator[str]:
        """Yield the documents in the order of the dataset."""
        return _at_least_one(SPLITTERS[self.cut_by](self._rows()), f"name: expected text in {self._called()}")

    def _called(self) -> str:
        return f"{self.name!r}, config {self.config!r}, split {self.split!r}"

    def _rows(self) -> Iterator[str]:
        datasets = need("datasets", "reading a dataset of the Hugging Face Hub")
        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )
            for row in rows:
                yield self._text(row)
        except _BadRow as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # `datasets` raises errors of many types, including those of other packages
            raise ValueError(
                f"name: expected a dataset that can be read, got {self._called()}: {type(error).__name__}: {error}. "
                "Check the names on https://huggingface.co/datasets and the network (access to some datasets has to be "
                "granted: `hf auth login`), or give a local folder of text instead"
            ) from error

    def _text(self, row: dict[str, Any]) -> str:
        text = row.get(self.column)
        if not isinstance(text, str):
            columns = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
            raise _BadRow(
                f"column: expected a column of text of {self._called()} (columns of text: {columns}), "
                f"got {self.column!r}"
            )
        return text


def hub_text(name: str) -> HubText:
    """Parse `hub:DATASET:CONFIG:SPLIT`; the default split is "train".

    Examples:
        >>> hub_text("hub:Salesforce/wikitext:wikitext-103-v1:test").split
        'test'
    """
    dataset, *more = name.removeprefix(HUB).split(":")
    if not name.startswith(HUB) or not dataset or len(more) > 2:
        raise ValueError(f"name: expected {HUB}DATASET:CONFIG:SPLIT, of which CONFIG may be empty, got {name!r}")
    config, split = (*more, "", "")[:2]
    return HubText(dataset, config or None, split or "train")


class _BadRow(Exception):
    """A row without text; a type of its own to distinguish it from errors of `datasets`."""


@final
@dataclass(frozen=True)
class PythonHelp(Corpus):
    """Python's own help, `pydoc_data.topics`, which ships with every Python: about 370 kB of English.

    Every topic is a document. Some topics are part of others (`help("while")` is also in `help("compound")`), so topics
    mostly contained in longer ones are dropped, and the splits do not overlap. A tenth of the text is held out for
    validation. Topics are assigned by a hash of their names, so most stay in their split across Python versions.

    Attributes:
        split: "train" or "validation".
    """

    split: Literal["train", "validation"] = "train"

    def __post_init__(self) -> None:
        if self.split not in ("train", "validation"):
            raise ValueError(f"split: expected 'train' or 'validation', got {self.split!r}")

    def describe(self) -> dict[str, Any]:
        """Describe the split by a hash of its text, which differs between Python versions."""
        digest = hashlib.sha256()
        for document in self.documents():
            digest.update(hashlib.sha256(document.encode()).digest())
        return {"kind": "Python's help", "split": self.split, "cut": "topics", "sha256": digest.hexdigest()}

    def documents(self) -> Iterator[str]:
        """Yield the topics, sorted by name."""
        return iter(_topics()[self.split])


@cache
def _topics() -> dict[str, tuple[str, ...]]:
    """Return the topics of both splits."""
    from pydoc_data.topics import topics

    kept = _without_parts_of_others(topics)
    held_out = _about_a_tenth(kept)
    return {
        "train": tuple(kept[name] for name in sorted(kept) if name not in held_out),
        "validation": tuple(kept[name] for name in sorted(held_out)),
    }


def _about_a_tenth(texts: dict[str, str]) -> set[str]:
    """Choose texts in the order of their names' hashes, up to a tenth of all characters."""
    room, chosen = sum(map(len, texts.values())) // 10, set()
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(texts[name]) <= room:
            room -= len(texts[name])
            chosen.add(name)
    return chosen


def _without_parts_of_others(texts: dict[str, str]) -> dict[str, str]:
    """Drop texts that share at least half of their 12-word sequences with longer ones."""
    kept: dict[str, str] = {}
    seen: set[tuple[str, ...]] = set()
    for name, text in sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])):
        words = text.split()
        stretches = {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}
        if text.strip() and (not stretches or 2 * len(stretches & seen) < len(stretches)):
            kept[name] = text
            seen |= stretches
    return kept


@final
@dataclass(frozen=True)
class JoinedText(Corpus):
    """Several corpora, one after another.

    Attributes:
        parts: one or more corpora.
    """

    parts: tuple[Corpus, ...]

    def __post_init__(self) -> None:
        some = isinstance(self.parts, tuple) and len(self.parts) > 0
        if not some or not all(isinstance(part, Corpus) for part in self.parts):
            raise ValueError(f"parts: expected a tuple of at least one corpus, got {self.parts!r}")

    def describe(self) -> dict[str, Any]:
        """Describe all parts."""
        return {"kind": "joined", "parts": [part.describe() for part in self.parts]}

    def documents(self) -> Iterator[str]:
        """Yield the documents of all parts."""
        return (document for part in self.parts for document in part.documents())


@final
@dataclass(frozen=True)
class PartOfText(Corpus):
    """A range of documents of a corpus: the first 50, or all after the first 1,000.

    Attributes:
        corpus: the whole corpus.
        start: index of the first document, counted from 0.
        stop: index after the last document; None for no limit.
    """

    corpus: Corpus
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, Corpus):
            raise ValueError(f"corpus: expected a corpus, got {self.corpus!r}")
        check_whole_number("start", self.start, 0)
        if self.stop is not None:
            check_whole_number("stop", self.stop, self.start + 1)

    def describe(self) -> dict[str, Any]:
        """Describe the corpus and the range."""
        return {"kind": "part", "of": self.corpus.describe(), "start": self.start, "stop": self.stop}

    def documents(self) -> Iterator[str]:
        """Yield the documents of the range."""
        chosen = islice(self.corpus.documents(), self.start, self.stop)
        return _at_least_one(chosen, f"start: expected fewer than the documents of {self.corpus}, got {self.start}")


def _at_least_one(documents: Iterator[str], expected: str) -> Iterator[str]:
    """Yield the documents; raise an error if there are none."""
    first = next(documents, None)
    if first is None:
        raise ValueError(f"{expected}, got no document")
    yield first
    yield from documents
