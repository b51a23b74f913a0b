"""A corpus and a tokenizer that tests of text share."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from transformers import PreTrainedTokenizerBase

from membydesign.data.text import Corpus, PythonHelp
from membydesign.data.tokenizer import train_tokenizer


@final
@dataclass(frozen=True)
class Texts(Corpus):
    """Documents given one by one; counts how often it is read."""

    texts: tuple[str, ...]
    reads: list[int]

    @staticmethod
    def of(*texts: str) -> "Texts":
        return Texts(texts, [])

    def describe(self) -> dict[str, Any]:
        return {"kind": "texts", "texts": list(self.texts)}

    def documents(self) -> Iterator[str]:
        self.reads.append(1)
        return iter(self.texts)


def help_tokenizer(folder: Path, vocab_size: int = 512) -> PreTrainedTokenizerBase:
    return train_tokenizer(PythonHelp("validation"), vocab_size, folder / f"bpe-{vocab_size}")
