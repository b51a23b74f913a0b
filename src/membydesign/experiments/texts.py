"""The text of an experiment: where it comes from, and the files that all of its runs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.data.bigrams import Bigrams, count_bigrams
from membydesign.data.text import Corpus, HubText, JoinedText, PythonHelp
from membydesign.data.text_files import TextFiles
from membydesign.data.token_files import TokenFile, pack
from membydesign.data.tokenizer import load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.experiments.workspace import Workspace

PYTHON_HELP, HUB = "python-help:", "hub:"
SPLITS = ("train", "validation", "held_out")


class TextsError(ValueError):
    """A text or tokenizer that is not there or cannot be read, and what to do."""


@dataclass(frozen=True)
class Texts:
    """What is read, by name, so that settings do not depend on whose machine they are on.

    A name is `python-help:SPLIT`, `hub:DATASET:CONFIG:SPLIT`, or a file or folder below the one that `--data` names.

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


def corpus_of(names: tuple[str, ...], data: Path | None) -> Corpus:
    """The text that names stand for."""
    found = [_one(name, data) for name in names]
    return found[0] if len(found) == 1 else JoinedText(tuple(found))


def _one(name: str, data: Path | None) -> Corpus:
    if name.startswith(PYTHON_HELP):
        return PythonHelp(name.removeprefix(PYTHON_HELP))  # pyright: ignore[reportArgumentType]
    if name.startswith(HUB):
        return HubText(*name.removeprefix(HUB).split(":"))
    if data is None:
        raise ValueError(f"data: expected the folder that holds {name} (mbd reproduce … --data FOLDER), got none")
    return TextFiles(data / name)


def prepare(texts: Texts, workspace: Workspace) -> Path:
    """Make what is not there yet of tokenizer, token files and counts of pairs; returns their folder.

    Raises:
        TextsError: if a text or the tokenizer cannot be had.
    """
    folder = workspace.directory / "data"
    try:
        corpora = {split: corpus_of(getattr(texts, split), workspace.data) for split in SPLITS}
        workspace.stage("tokenizer")
        if isinstance(texts.tokenizer, int):
            tokenizer = train_tokenizer(corpora["train"], texts.tokenizer, folder / "tokenizer")
        else:
            tokenizer = load_tokenizer(texts.tokenizer)
        workspace.stage("tokens")
        files = {split: pack(corpus, tokenizer, folder / f"{split}.safetensors") for split, corpus in corpora.items()}
    except (ValueError, OSError) as error:
        raise TextsError(str(error)) from error
    workspace.stage("pairs of tokens")
    count_bigrams(files["train"], folder / "bigrams.safetensors")
    return folder


def prepared(folder: Path) -> TokenFiles:
    """The files of a folder that `prepare` has filled."""
    train, validation, held_out = (TokenFile(folder / f"{name}.safetensors") for name in SPLITS)
    return TokenFiles(train, validation, held_out, Bigrams(folder / "bigrams.safetensors"))
