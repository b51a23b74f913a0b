"""Read text to evaluate on from a user's source, tokenised as for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from membydesign.data.text import HUB, Corpus, JoinedText, PythonHelp, hub_text
from membydesign.data.text_files import TextFiles
from membydesign.data.token_files import stretches
from membydesign.data.tokenizer import bos_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

EMBEDDED = "embedded"
"""Name of the text that ships with every Python: its own help."""


def text_at(source: str | Path) -> Corpus:
    """Open a corpus.

    Args:
        source: "embedded" for Python's own help, `hub:DATASET:CONFIG:SPLIT` for a dataset of the Hugging Face Hub
            (`hub_text`), or a file or folder that `TextFiles` reads.
    """
    if str(source) == EMBEDDED:
        return JoinedText((PythonHelp("train"), PythonHelp("validation")))
    if str(source).startswith(HUB):
        return hub_text(str(source))
    if not Path(source).exists():
        raise ValueError(
            f"text: expected {EMBEDDED!r}, {HUB}DATASET:CONFIG:SPLIT, a file or a folder, got no such path "
            f"{str(source)!r}"
        )
    return TextFiles(Path(source))


def read_stream(source: str | Path, tokenizer: PreTrainedTokenizerBase, most_tokens: int | None = None) -> Tensor:
    """Tokenise a text as `pack` does: BOS, the first document, BOS, the second, and so on, [N].

    Args:
        source: source of the text, see `text_at`.
        tokenizer: Transformers tokenizer. If it has no BOS token, its EOS token is used instead.
        most_tokens: maximum number of tokens; None for the whole text.
    """
    corpus, bos = text_at(source), tokenizer.bos_token_id
    if bos is None:
        bos = tokenizer.eos_token_id
    bos = bos if isinstance(bos, int) else bos_of(tokenizer)
    try:
        parts = [*stretches(corpus.documents(), tokenizer, bos, most_tokens=most_tokens)]
    except ValueError as error:
        raise ValueError(f"text: {str(error).partition(': ')[2]}") from error
    return torch.cat([torch.frombuffer(stretch, dtype=torch.int64) for stretch, _ in parts])
