"""Measure tokens per second of packing text, counting pairs and labelling AR-hits, against plain implementations."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from membydesign_bench.problem import Size
from membydesign_bench.timing import Job, Row, Settings, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from membydesign.data.token_files import TokenFile

VOCABULARY = 2048
SIZE = Size(128, 1, 2048, 1)
"""Of counting and labelling: B windows of T tokens."""

UNIT = "thousand tokens/s"


def text(settings: Settings) -> Iterator[Job]:
    """Packing of Python's help; pairs and AR-hits of B windows of T tokens (H and D mean nothing here)."""
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        return
    yield Job("packing of text", partial(_packing, settings.rounds))
    for size in settings.sizes or (SIZE,):
        yield Job(f"pairs and AR-hits of {size.B}×{size.T:,} tokens", partial(_pairs, size, settings.rounds))


def _row(task: str, tokens: int, times: dict[str, float]) -> Row:
    (ours, value), (other, reference) = ((name, tokens / ms) for name, ms in times.items())
    return Row("text", task, f"{tokens:,}", ours, value, UNIT, other, reference)


def _packing(rounds: int) -> list[Row]:
    """Compare tokenising and writing with the tokenizer as Transformers calls it."""
    from membydesign.data.text import PythonHelp
    from membydesign.data.token_files import pack
    from membydesign.data.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        corpus, path = PythonHelp(), Path(folder) / "tokens"
        tokenizer: Any = train_tokenizer(corpus, VOCABULARY, Path(folder) / "bpe")
        documents = list(corpus.documents())
        tokens = len(pack(corpus, tokenizer, path))

        def ours() -> None:
            path.unlink()
            pack(corpus, tokenizer, path)

        def theirs() -> None:
            tokenizer(documents, add_special_tokens=False, verbose=False)

        works: dict[str, Callable[[], object]] = {
            "tokenise and write": ours,
            "Transformers' call of the tokenizer": theirs,
        }
        return [_row("packing", tokens, interleaved(works, rounds))]


def _stream(path: Path, n: int) -> TokenFile:
    """Tokens of which few are frequent and many rare."""
    from membydesign.data.seeds import generator
    from membydesign.data.tensor_files import Writer
    from membydesign.data.token_files import KIND, VERSION, TokenFile

    draws = torch.rand(n, generator=generator("bench", "text"), dtype=torch.float64)
    with Writer(path, {"kind": KIND, "version": VERSION, "vocab_size": VOCABULARY}) as file:
        file.add(KIND, "U16", (draws**4 * VOCABULARY).to(torch.int16))
        file.done(tokens=n, documents=1)
    return TokenFile(path)


def _pairs(size: Size, rounds: int) -> list[Row]:
    """Compare counting pairs with a `Counter`, and labelling AR-hits with dictionaries."""
    from membydesign.data.bigrams import count_bigrams
    from membydesign.evaluation.ar_hits import ar_hits

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bigrams"
        tokens = _stream(Path(folder) / "tokens", size.B * size.T)
        windows, stream = tokens.rows(size.T, slice(None)), tokens.read(0, len(tokens)).tolist()
        bigrams = count_bigrams(tokens, path)
        counter = Counter(pairwise(stream))

        def ours() -> None:
            path.unlink()
            count_bigrams(tokens, path)

        counting = {
            "chunks, sorted, to disk": ours,
            "a Counter": lambda: Counter(pairwise(stream)),
        }
        labelling: dict[str, Callable[[], object]] = {
            "all windows at once": lambda: ar_hits(windows, bigrams, 1),
            "a loop with dictionaries": lambda: [by_dictionary(window, counter, 1) for window in windows],
        }
        return [
            _row("counting pairs", len(tokens), interleaved(counting, rounds)),
            _row("labelling AR-hits", len(tokens), interleaved(labelling, rounds)),
        ]


def by_dictionary(window: Tensor, counts: Counter[tuple[int, int]], threshold: int) -> list[bool]:
    """AR-hits of a window [L], token by token."""
    last: dict[tuple[int, int], int] = {}
    hits, tokens = [], window.tolist()
    for t, pair in enumerate(pairwise(tokens)):
        hits.append(pair in last and t - last[pair] <= 1024 and counts[pair] <= threshold)
        last[pair] = t
    return hits
