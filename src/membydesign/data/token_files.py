"""Token files: a corpus as one stream of tokens on disk, made once and mapped into memory."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, final

from membydesign.data.mapped import Mapped, Writer, differences, read_header, read_mapped, widen
from membydesign.data.mqar import check_whole
from membydesign.data.tokenizer import bos_of, encoder, fingerprint, vocabulary_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from membydesign.data.text import Corpus

KIND = "tokens"
VERSION = 1
"""Of what stands in the files; raised when the same text comes out as another stream."""

PIECE = 2**22
"""Characters that are tokenised at once; longer documents are cut before a space or line end."""

DOCUMENTS = 4096
"""Documents that are tokenised at once, at most."""


@final
class TokenFile:
    """A stream of tokens that is mapped into memory; made by `pack`.

    Args:
        path: of the file.

    Attributes:
        header: what the file holds: "tokens" and "documents", numbers of them; "vocab_size", V; "bos"; "tokenizer", its
            fingerprint; "corpus", as it describes itself; "most_tokens", where the stream was cut; "sha256".
        stored: the tokens, as int16 or int32, which `widen` reads, [n].
    """

    def __init__(self, path: Path) -> None:
        mapped: Mapped = read_mapped(path, KIND)
        _refuse(path, differences(mapped.header, {"version": VERSION}))
        self.path, self.header, self.stored = path, mapped.header, mapped.tensors[KIND]

    def __len__(self) -> int:
        """Tokens."""
        return len(self.stored)

    @property
    def vocab_size(self) -> int:
        """V of the tokenizer."""
        return self.header["vocab_size"]

    @property
    def documents(self) -> int:
        """Documents, each with one BOS before it."""
        return self.header["documents"]

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens from `start` to before `stop`, as int64, [n]."""
        return widen(self.stored[start:stop])

    def rows(self, length: int, rows: Tensor | slice) -> Tensor:
        """Some of the windows of L tokens that the stream is cut into, as int64, [rows,L]."""
        windows = len(self) // length
        return widen(self.stored[: windows * length].view(windows, length)[rows])

    def check(self, tokenizer: PreTrainedTokenizerBase, corpus: Corpus | None = None) -> None:
        """Refuse the file if it was made with another tokenizer or, if one is given, from another corpus."""
        expected: dict[str, Any] = {"tokenizer": fingerprint(tokenizer)}
        if corpus is not None:
            expected["corpus"] = corpus.describe()
        _refuse(self.path, differences(self.header, expected))


def _refuse(path: Path, found: list[str]) -> None:
    if found:
        raise ValueError(f"path: expected another file of tokens than {path}: {'; '.join(found)}; pack it anew")


def pack(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    most_tokens: int | None = None,
    watch: Callable[[int, int], None] = lambda _tokens, _documents: None,
) -> TokenFile:
    """The token file of a corpus; made if it is not there, or if corpus, tokenizer or limit are not those it is of.

    The stream is BOS, the first document, BOS, the second, and so on, without any other token that stands for no text.
    Tokens are stored in 16 bits if the vocabulary fits them, otherwise in 32.

    Args:
        corpus: the text. One from the Hub is not asked for again once its file is there.
        tokenizer: of Transformers, with a BOS token.
        path: of the file, for example `Path("runs/train.safetensors")`. A file of something else is not replaced.
        most_tokens: where the stream ends even if there is more text; None for all of it.
        watch: called with tokens and documents so far, now and then.
    """
    if most_tokens is not None:
        check_whole("most_tokens", most_tokens, 1)
    V = vocabulary_size(tokenizer)
    asked = {
        "kind": KIND,
        "version": VERSION,
        "vocab_size": V,
        "bos": bos_of(tokenizer),
        "tokenizer": fingerprint(tokenizer),
        "corpus": corpus.describe(),
        "most_tokens": most_tokens,
    }
    found = read_header(path, KIND)
    if found is not None and not differences(found, asked):
        return TokenFile(path)
    dtype, code = ("U16", "H") if V <= 2**16 else ("U32", "I")
    tokens = documents = 0
    with Writer(path, asked) as file:
        for stretch, begun in stretches(corpus.documents(), tokenizer, asked["bos"], code, most_tokens=most_tokens):
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
    """The stream of documents, as many tokens at a time as are made at once, and how many documents begin there.

    Args:
        documents: each becomes its tokens, after a BOS.
        tokenizer: of Transformers.
        bos: the token that stands before documents.
        code: the type of numbers, as `array` names it.
        most_tokens: where the stream ends even if there is more text; None for all of it.
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
    """Pieces of text with whether a document begins there, as many at a time as are tokenised at once."""
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
    """A document in pieces of at most so many characters, each but the first from a space or line end on.

    Tokenizers need a hundred times the memory of what they are given at once. Most of them cut at such places anyway.
    """
    start = 0
    while len(document) - start > most:
        middle = start + most // 2
        stop = max(document.rfind(space, middle, start + most) for space in " \n")
        stop = start + most if stop < 0 else stop
        yield document[start:stop]
        start = stop
    yield document[start:]
