"""The text of an experiment: where it comes from, and the files that all of its runs read."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.data.bigrams import Bigrams, count_bigrams
from membydesign.data.repeats import RepeatedWords
from membydesign.data.text import HUB, Corpus, JoinedText, PythonHelp, hub_text
from membydesign.data.text_files import TextFiles
from membydesign.data.token_files import TokenFile, pack
from membydesign.data.tokenizer import load_tokenizer, train_tokenizer
from membydesign.evaluation.niah_documents import NeedleText
from membydesign.files import to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from membydesign.experiments.workspace import Workspace

PYTHON_HELP, NEEDLES, REPEATS = "python-help:", "needles:", "repeats:"
SPLITS = ("train", "validation", "held_out")
TOKENIZER = "tokenizer"
"""The folder of the tokenizer beside the token files."""
READ = "texts.json"
"""Beside the training runs: digests of what they read."""


class TextsError(ValueError):
    """A text or tokenizer that is not there or cannot be read, and what to do."""


@dataclass(frozen=True)
class Texts:
    """What is read, by name, so that settings do not depend on whose machine they are on.

    A name is `python-help:SPLIT`, `hub:DATASET:CONFIG:SPLIT`, `needles:COUNT:NAME` for so many questions about the text
    of that name (see `NeedleText`), `repeats:COUNT:LEAST-MOST:NAME` for so many lists of as many of its words (see
    `RepeatedWords`), or a file or folder below the one that `--data` names.

    Attributes:
        train: trained on, one after another.
        validation: on which settings are chosen.
        held_out: on which models are compared.
        tokenizer: a name on the Hub, a folder, or the size of a vocabulary that is learned from `train`.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]
    tokenizer: str | int


class TokenFiles(NamedTuple):
    """What runs read."""

    train: TokenFile
    validation: TokenFile
    held_out: TokenFile
    bigrams: Bigrams


class Part(NamedTuple):
    """A text that becomes a token file.

    Attributes:
        names: what is read, as of `Texts`.
        most_tokens: where it ends even if there is more; None for all of it.
    """

    names: tuple[str, ...]
    most_tokens: int | None = None


def corpus_of(names: tuple[str, ...], data: Path | None) -> Corpus:
    """The text that names stand for."""
    found = [_one(name, data) for name in names]
    return found[0] if len(found) == 1 else JoinedText(tuple(found))


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
    """Errors of texts and tokenizers as those that a command prints.

    Raises:
        TextsError: instead of them.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise TextsError(str(error)) from error


def prepare_tokenizer(
    tokenizer: str | int, learned_from: tuple[str, ...], workspace: Workspace, digits: int = 1
) -> PreTrainedTokenizerBase:
    """The tokenizer of an experiment, which is kept beside its token files.

    Args:
        tokenizer: a name on the Hub, a folder, or the size of a vocabulary.
        learned_from: the text of such a vocabulary.
        workspace: of the experiment.
        digits: of a token of such a vocabulary, at most.

    Raises:
        TextsError: if it cannot be had.
    """
    folder = workspace.directory / "data" / TOKENIZER
    workspace.stage("tokenizer")
    with refused():
        if isinstance(tokenizer, int):
            return train_tokenizer(corpus_of(learned_from, workspace.data), tokenizer, folder, digits)
        words = load_tokenizer(tokenizer)
        words.save_pretrained(folder)
    return words


def prepare_parts(parts: Mapping[str, Part], words: PreTrainedTokenizerBase, workspace: Workspace) -> Path:
    """Make the token files that are not there yet, one for each part; returns their folder.

    Args:
        parts: texts, by the names of their files.
        words: the tokenizer.
        workspace: of the experiment.

    Raises:
        TextsError: if a text cannot be had.
    """
    folder = workspace.directory / "data"
    with refused():
        corpora = {name: corpus_of(part.names, workspace.data) for name, part in parts.items()}
        workspace.stage("tokens")
        for name, corpus in corpora.items():
            pack(corpus, words, folder / f"{name}.safetensors", most_tokens=parts[name].most_tokens)
    return folder


def same_texts(names: Iterable[str], workspace: Workspace, **others: str) -> None:
    """Refuse texts that are not those of the training runs that are there: their results would be mixed.

    Args:
        names: of the token files.
        workspace: of the experiment.
        others: texts that are no token files.

    Raises:
        TextsError: if a text or the tokenizer has changed since.
    """
    folder, kept = workspace.directory / "data", workspace.runs / READ
    now = {name: TokenFile(folder / f"{name}.safetensors").header["sha256"] for name in names}
    now |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in others.items()}
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        differ = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if differ:
            raise TextsError(
                f"data: expected the texts that the runs in {workspace.runs} have read, and there are others for "
                f"{', '.join(differ)} (other files, another tokenizer, or another revision on the Hub); give the same "
                "texts, or name another folder with --out"
            )
    else:
        workspace.runs.mkdir(parents=True, exist_ok=True)
        write_text(kept, to_json(now))


def prepare(texts: Texts, workspace: Workspace) -> Path:
    """Make what is not there yet of tokenizer, token files and counts of pairs; returns their folder.

    Raises:
        TextsError: if a text or the tokenizer cannot be had, or is not the one of the runs that are there.
    """
    parts = {split: Part(getattr(texts, split)) for split in SPLITS}
    folder = prepare_parts(parts, prepare_tokenizer(texts.tokenizer, texts.train, workspace), workspace)
    same_texts(SPLITS, workspace)
    workspace.stage("pairs of tokens")
    count_bigrams(TokenFile(folder / "train.safetensors"), folder / "bigrams.safetensors")
    return folder


def prepared(folder: Path) -> TokenFiles:
    """The files of a folder that `prepare` has filled."""
    train, validation, held_out = (TokenFile(folder / f"{name}.safetensors") for name in SPLITS)
    return TokenFiles(train, validation, held_out, Bigrams(folder / "bigrams.safetensors"))
