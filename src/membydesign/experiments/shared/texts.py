"""Prepare the texts of an experiment: tokenizer, token files and counts of pairs that all of its runs read."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.data.bigrams import Bigrams, count_bigrams
from membydesign.data.repeated_lists import RepeatedWords
from membydesign.data.text import HUB, Corpus, JoinedText, PythonHelp, hub_text
from membydesign.data.text_files import TextFiles
from membydesign.data.token_files import TokenFile, pack
from membydesign.data.tokenizer import load_tokenizer, train_tokenizer
from membydesign.evaluation.niah.documents import NeedleText
from membydesign.files import read_object, to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from membydesign.experiments.shared.run_context import RunContext

PYTHON_HELP, NEEDLES, REPEATS = "python-help:", "needles:", "repeats:"
SPLITS = ("train", "validation", "held_out")
TOKENIZER = "tokenizer"
"""The folder of the tokenizer, next to the token files."""
READ = "texts.json"
"""Digests of the texts that training runs read, in their folder."""


class TextsError(ValueError):
    """A text or tokenizer is missing or unreadable; the message says what to do."""


@dataclass(frozen=True)
class Texts:
    """The texts of an experiment, by name, so that settings do not depend on the machine.

    A name is `python-help:SPLIT`, `hub:DATASET:CONFIG:SPLIT`, `needles:COUNT:NAME` for COUNT questions about the text
    NAME (see `NeedleText`), `repeats:COUNT:LEAST-MOST:NAME` for COUNT lists of LEAST to MOST of its words (see
    `RepeatedWords`), or a file or folder in the `--data` folder.

    Attributes:
        train: texts to train on, one after another.
        validation: texts that choose settings.
        held_out: texts that compare models.
        tokenizer: a name on the Hub, a folder, or the size of a vocabulary that is learned from `train`.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]
    tokenizer: str | int


class TokenFiles(NamedTuple):
    """The files that runs read."""

    train: TokenFile
    validation: TokenFile
    held_out: TokenFile
    bigrams: Bigrams


class Part(NamedTuple):
    """A text that becomes a token file.

    Attributes:
        names: names of texts, see `Texts`.
        most_tokens: the most tokens to read; None for all.
    """

    names: tuple[str, ...]
    most_tokens: int | None = None


def corpus_of(names: tuple[str, ...], data: Path | None) -> Corpus:
    """Return the text that names stand for."""
    parts = [_one(name, data) for name in names]
    return parts[0] if len(parts) == 1 else JoinedText(tuple(parts))


def _one(name: str, data: Path | None) -> Corpus:
    kind, _, rest = name.partition(":")
    if f"{kind}:" == PYTHON_HELP:
        return PythonHelp(rest)  # pyright: ignore[reportArgumentType]
    if f"{kind}:" == HUB:
        return hub_text(name)
    if f"{kind}:" == NEEDLES:
        count, _, about = rest.partition(":")
        return NeedleText(_one(about, data), int(count))
    if f"{kind}:" == REPEATS:
        count, words, about = rest.split(":", 2)
        least, most = words.split("-")
        return RepeatedWords(_one(about, data), int(count), (int(least), int(most)))
    if data is None:
        raise ValueError(f"data: expected the folder that holds {name} (mbd reproduce … --data FOLDER), got none")
    return TextFiles(data / name)


@contextmanager
def refused() -> Iterator[None]:
    """Turn errors of texts and tokenizers into those that a command prints.

    Raises:
        TextsError: in place of ValueError and OSError.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise TextsError(str(error)) from error


def prepare_tokenizer(
    tokenizer: str | int, learned_from: tuple[str, ...], context: RunContext, digits: int = 1
) -> PreTrainedTokenizerBase:
    """Load or train the tokenizer of an experiment, and keep it next to its token files.

    Args:
        tokenizer: a name on the Hub, a folder, or the size of a vocabulary.
        learned_from: the text of such a vocabulary.
        context: of the experiment.
        digits: maximum digits per token of such a vocabulary.

    Raises:
        TextsError: if it is unavailable.
    """
    folder = context.directory / "data" / TOKENIZER
    context.stage("tokenizer")
    with refused():
        if isinstance(tokenizer, int):
            return train_tokenizer(corpus_of(learned_from, context.data), tokenizer, folder, digits)
        words = load_tokenizer(tokenizer)
        words.save_pretrained(folder)
    return words


def prepare_parts(parts: Mapping[str, Part], words: PreTrainedTokenizerBase, context: RunContext) -> Path:
    """Write the token files that are missing, one for each part; return their folder.

    Args:
        parts: texts, by the names of their files.
        words: the tokenizer.
        context: of the experiment.

    Raises:
        TextsError: if a text is unavailable.
    """
    folder = context.directory / "data"
    with refused():
        corpora = {name: corpus_of(part.names, context.data) for name, part in parts.items()}
        context.stage("tokens")
        for name, corpus in corpora.items():
            pack(corpus, words, folder / f"{name}.safetensors", most_tokens=parts[name].most_tokens)
    return folder


def same_texts(names: Iterable[str], context: RunContext, **others: str) -> None:
    """Raise an error if existing training runs read other texts, because results would be mixed.

    Args:
        names: of the token files.
        context: of the experiment.
        others: texts that are not token files.

    Raises:
        TextsError: if a text or the tokenizer has changed since.
    """
    folder, kept = context.directory / "data", context.runs / READ
    now = {name: TokenFile(folder / f"{name}.safetensors").header["sha256"] for name in names}
    now |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in others.items()}
    if kept.exists():
        with refused():
            before = read_object(kept)
        differ = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if differ:
            raise TextsError(
                f"data: expected the texts that the runs in {context.runs} have read, and there are others for "
                f"{', '.join(differ)} (other files, another tokenizer, or another revision on the Hub); give the same "
                "texts, or name another folder with --out"
            )
    else:
        context.runs.mkdir(parents=True, exist_ok=True)
        write_text(kept, to_json(now))


def prepare(texts: Texts, context: RunContext) -> Path:
    """Write the tokenizer, token files and counts of pairs that are missing; return their folder.

    Raises:
        TextsError: if a text or the tokenizer is unavailable, or differs from that of existing runs.
    """
    parts = {split: Part(getattr(texts, split)) for split in SPLITS}
    folder = prepare_parts(parts, prepare_tokenizer(texts.tokenizer, texts.train, context), context)
    same_texts(SPLITS, context)
    context.stage("pairs of tokens")
    count_bigrams(TokenFile(folder / "train.safetensors"), folder / "bigrams.safetensors")
    return folder


def prepared(folder: Path) -> TokenFiles:
    """Open the files that `prepare` has written."""
    train, validation, held_out = (TokenFile(folder / f"{name}.safetensors") for name in SPLITS)
    return TokenFiles(train, validation, held_out, Bigrams(folder / "bigrams.safetensors"))
