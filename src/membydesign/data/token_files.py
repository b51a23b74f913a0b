"""Token files: a corpus as one stream of tokens on disk, written once and read piece by piece."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, final

import torch

from membydesign.data.tensor_files import TensorFile, Writer, differences, read_header
from membydesign.data.tokenizer import bos_of, encoder, fingerprint, vocabulary_size
from membydesign.errors import check_whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from membydesign.data.text import Corpus

KIND = "tokens"
VERSION = 1
"""Format version; increased when the same text would produce another stream."""

PIECE = 2**22
"""Number of characters tokenised at a time; longer documents are split before a space or line end."""

DOCUMENTS = 4096
"""Maximum number of documents tokenised at a time."""


@final
class TokenFile:
    """A stream of tokens on disk, created by `pack`; it may be larger than memory.

    Args:
        path: token file.
        verify: whether to compare the tokens with the hash in the header, once per process and file. That reads the
            whole file, a few seconds per GB. Ids are checked in any case, when they are read.

    Attributes:
        header: file header: "tokens" and "documents", their numbers; "vocab_size", V; "bos"; "tokenizer", its
            fingerprint; "corpus", its description; "most_tokens", the limit of the stream; "sha256".
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self._tensors = TensorFile(path, KIND, (KIND,))
        self.path, self.header = path, self._tensors.header
        _refuse(path, differences(self.header, {"version": VERSION}))
        for name, least in (("vocab_size", 1), ("documents", 0)):
            if type(self.header.get(name)) is not int or self.header[name] < least:
                _refuse(path, [f"its {name} is {self.header.get(name)!r}, not a whole number of at least {least}"])
        _refuse(path, differences(self.header, {"tokens": len(self)}))
        if verify:
            self._tensors.verify()

    def __len__(self) -> int:
        """Number of tokens."""
        return self._tensors.length(KIND)

    @property
    def stored_as(self) -> str:
        """Type of the tokens in the file: "U16" or "U32"."""
        return self._tensors.entries[KIND].dtype

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V of the tokenizer."""
        return self.header["vocab_size"]

    @property
    def documents(self) -> int:
        """Number of documents, each preceded by one BOS."""
        return self.header["documents"]

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens from `start` up to, not including, `stop` as int64, [n]."""
        return self._checked(self._tensors.read(KIND, start, stop))

    def rows(self, length: int, rows: Tensor | slice) -> Tensor:
        """Divide the stream into windows of L tokens and return some of them as int64, [rows,L]."""
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self) // length)
            rows = torch.arange(first, last, step)
        return self._checked(self._tensors.rows(KIND, length, rows))

    def _checked(self, ids: Tensor) -> Tensor:
        """Return tokens, or raise an error if the vocabulary does not have them: models index with them."""
        if ids.numel() and int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"path: expected tokens below vocab_size = {self.vocab_size:,} in {self.path}, got {int(ids.max()):,}; "
                "it is damaged: remove it to have it rebuilt"
            )
        return ids

    def check(self, tokenizer: PreTrainedTokenizerBase, corpus: Corpus | None = None) -> None:
        """Raise an error if the file was made with another tokenizer or, if given, from another corpus."""
        expected: dict[str, Any] = {"tokenizer": fingerprint(tokenizer)}
        if corpus is not None:
            expected["corpus"] = corpus.describe()
        _refuse(self.path, differences(self.header, expected))


def _refuse(path: Path, mismatches: list[str]) -> None:
    if mismatches:
        raise ValueError(
            f"path: expected a matching file of tokens, got {path}: {'; '.join(mismatches)}; pack it again"
        )


def pack(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    most_tokens: int | None = None,
    watch: Callable[[int, int], None] = lambda _tokens, _documents: None,
) -> TokenFile:
    """Return the token file of a corpus, writing it if it is missing or if corpus, tokenizer or limit have changed.

    The stream is BOS, the first document, BOS, the second, and so on, without any other special tokens. Tokens are
    stored in 16 bits if the vocabulary allows, otherwise in 32.

    Args:
        corpus: source text. A corpus on the Hub is not downloaded again once its file exists.
        tokenizer: Transformers tokenizer with a BOS token.
        path: token file, for example `Path("runs/train.safetensors")`. A file with other contents is never overwritten.
        most_tokens: maximum length of the stream; None for the whole corpus.
        watch: called from time to time with the tokens and documents written so far.
    """
    if most_tokens is not None:
        check_whole_number("most_tokens", most_tokens, 1)
    V = vocabulary_size(tokenizer)
    header = {
        "kind": KIND,
        "version": VERSION,
        "vocab_size": V,
        "bos": bos_of(tokenizer),
        "tokenizer": fingerprint(tokenizer),
        "corpus": corpus.describe(),
        "most_tokens": most_tokens,
    }
    stored = read_header(path, KIND)
    if stored is not None and not differences(stored, header):
        return TokenFile(path)
    dtype, code = ("U16", "H") if V <= 2**16 else ("U32", "I")
    tokens = documents = 0
    with Writer(path, header) as file:
        for stretch, begun in stretches(corpus.documents(), tokenizer, header["bos"], code, most_tokens=most_tokens):
            file.add(KIND, dtype, stretch.tobytes())
            tokens, documents = tokens + len(stretch), documents + begun
            watch(tokens, documents)
        file.done(tokens=tokens, documents=documents)
    return TokenFile(path)


def stretches(
    documents: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    bos: int,
    code: str = "q",
    *,
    most_tokens: int | None = None,
) -> Iterator[tuple[array[int], int]]:
    """Tokenise documents into one stream; yield stretches of it with the number of documents that begin in each.

    Args:
        documents: texts; each becomes BOS and its tokens.
        tokenizer: Transformers tokenizer.
        bos: token that precedes documents.
        code: type code of the arrays, as in the module `array`.
        most_tokens: maximum length of the stream; None for all documents.
    """
    encode, left = encoder(tokenizer), most_tokens
    for pieces in _batches(documents):
        stretch, begun = array(code), 0
        for ids, (_, begins) in zip(encode([text for text, _ in pieces]), pieces, strict=True):
            room = None if left is None else left - len(stretch)
            if room == 0:
                break
            stretch.fromlist(([bos, *ids] if begins else ids)[:room])
            begun += begins
        yield stretch, begun
        left = None if left is None else left - len(stretch)
        if left == 0:
            return


def _batches(documents: Iterator[str]) -> Iterator[list[tuple[str, bool]]]:
    """Group pieces of text, each with a flag for the start of a document, into batches for the tokenizer."""
    batch, size = [], 0
    for document in documents:
        for i, piece in enumerate(cut_long(document)):
            batch.append((piece, i == 0))
            size += len(piece)
            if size >= PIECE or len(batch) >= DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def cut_long(document: str, most: int = PIECE) -> Iterator[str]:
    """Split a document into pieces of at most `most` characters, before a space or line end where possible.

    Tokenizers need about a hundred times the memory of their input. Most of them split at such places anyway.
    """
    start = 0
    while len(document) - start > most:
        middle = start + most // 2
        stop = max(document.rfind(space, middle, start + most) for space in " \n")
        stop = start + most if stop < 0 else stop
        yield document[start:stop]
        start = stop
    yield document[start:]
