"""Tokenizers: other people's by name, or byte-level BPE of one's own text."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

from membydesign.data.mqar import check_whole
from membydesign.data.text import need
from membydesign.files import to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from membydesign.data.text import Corpus

BOS = "<|bos|>"
"""The token before every document, of tokenizers that are trained here; it also ends the document before."""

BYTES = 256

DIGITS = {1: "single tokens", 3: "groups of three"}
"""How numbers are cut. It is kept with what a tokenizer was trained on, since older ones have no such rule."""

TRAINED_ON = "trained_on.json"
"""Beside a tokenizer that was trained here: on what, and with how many tokens."""


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer of Transformers.

    Args:
        name: on the Hugging Face Hub, for example "fla-hub/gla-1.3B-100B", or a folder. Code that comes with a
            tokenizer is never run.
    """
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        raise ValueError(f"name: expected the name or folder of a tokenizer, got {name!r}")
    transformers = need("transformers", "a tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # of Transformers, of the Hub and of the network: many kinds
        raise ValueError(
            f"name: expected a tokenizer that can be read, got {str(name)!r}: {type(error).__name__}: {error}"
        ) from error


def train_tokenizer(corpus: Corpus, vocab_size: int, folder: Path, digits: int = 1) -> PreTrainedTokenizerBase:
    r"""A byte-level BPE, as GPT-2's but with a rule for numbers, trained on a corpus; `AutoTokenizer` loads it.

    The same text gives the same tokenizer, on however many threads. A folder that already has a tokenizer of this
    corpus and size is loaded; one of another corpus or size, or with another rule for digits, is replaced, and one from
    elsewhere is refused.

    Every text can be told from its tokens: no character is unknown. Called like any tokenizer, it puts its token BOS
    first.

    Args:
        corpus: the training split; never the text that is tested on.
        vocab_size: V: 256 bytes, BOS, and what is merged.
        folder: of the tokenizer.
        digits: of which a token has at most so many. With 1 every digit is by itself. With 3 numbers are cut from the
            left into groups of three, as Llama 3 does, and each of the 1,110 groups is a token, however rare it is.
    """
    if digits not in DIGITS:
        raise ValueError(f"digits: expected one of {', '.join(map(str, DIGITS))}, got {digits!r}")
    groups = ["".join(each) for size in range(2, digits + 1) for each in product("0123456789", repeat=size)]
    check_whole("vocab_size", vocab_size, BYTES + 1 + len(groups))
    tokenizers, transformers = need("tokenizers", "training a tokenizer"), need("transformers", "a tokenizer")
    asked = {"vocab_size": vocab_size, "digits": DIGITS[digits], "corpus": corpus.describe()}
    if _trained_on(folder) == asked:
        return load_tokenizer(folder)

    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    single = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([single, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(groups),
        min_frequency=2,
        special_tokens=[BOS],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents(), trainer)
    most = tokenizer.get_vocab_size() + len(groups)
    if most < vocab_size:
        raise ValueError(
            f"vocab_size: expected at most {most}, which is all that repeats in this text, got {vocab_size}"
        )
    if groups:
        tokenizer = _with_groups(tokenizer, groups)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, clean_up_tokenization_spaces=False
    )
    _save(wrapped, folder, asked)
    return load_tokenizer(folder)


def _with_groups(tokenizer: Any, groups: list[str]) -> Any:
    """The same tokenizer with tokens for groups of digits, into which numbers are cut from the left."""
    state, longest = json.loads(tokenizer.to_str()), len(groups[-1])
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    for group in groups:
        vocabulary[group] = len(vocabulary)
        # Pairs are merged by rank, 00 before 70: 700 must be found from 70 and 0 as well as from 7 and 00.
        merges += [[group[:cut], group[cut:]] for cut in range(1, len(group))]
    cut = {"type": "Split", "pattern": {"Regex": f"[0-9]{{1,{longest}}}"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"]["pretokenizers"][0] = cut
    return type(tokenizer).from_str(json.dumps(state))


def _trained_on(folder: Path) -> dict[str, Any] | None:
    """What the tokenizer of a folder was trained on; None if there is no folder or nothing in it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        return json.loads((folder / TRAINED_ON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"folder: expected a new folder or one of a tokenizer that was trained here, and {folder} is neither"
        ) from None


def _save(tokenizer: PreTrainedTokenizerBase, folder: Path, trained_on: dict[str, Any]) -> None:
    """Beside its place first, and then moved: what is at `folder` is whole."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer.save_pretrained(partial)
        write_text(partial / TRAINED_ON, to_json(trained_on))
        if _trained_on(folder) not in (None, trained_on):
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except OSError:
        if _trained_on(folder) != trained_on:  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than its largest token, added ones included."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer with tokens that a model does not have.

    Args:
        tokenizer: of the text.
        vocab_size: V of the model; larger ones than the tokenizer's are fine, and common.
    """
    check_whole("vocab_size", vocab_size, 1)
    needed = vocabulary_size(tokenizer)
    if needed > vocab_size:
        raise ValueError(
            f"tokenizer: expected one with tokens below the model's vocab_size={vocab_size:,}, got one with "
            f"{needed:,} tokens ({tokenizer.name_or_path or type(tokenizer).__name__}); take the tokenizer that the "
            "model was trained with, or a model of that vocab_size"
        )


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that stands before documents."""
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        raise ValueError(
            f"tokenizer: expected one with a BOS token, got {tokenizer.name_or_path or type(tokenizer).__name__}, "
            "which has none; set tokenizer.bos_token, for example to tokenizer.eos_token"
        )
    return bos


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which tokens a text has: vocabulary, merges, normalisation, special tokens, BOS."""
    if tokenizer.is_fast:
        state = _backend_state(tokenizer)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    state = {"tokenizer": state, "bos": bos_of(tokenizer), "split": bool(tokenizer.split_special_tokens)}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _backend_state(tokenizer: Any) -> dict[str, Any]:
    """What `tokenizers` knows of it, without truncation and padding: those are what the last caller asked for."""
    return {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to their tokens, without BOS or others that stand for no text; as fast as there is.

    What looks like a special token in a text is that token, as Transformers has it, unless the tokenizer's
    `split_special_tokens` is set.
    """
    if tokenizer.is_fast:
        backend = need("tokenizers", "a tokenizer").Tokenizer.from_str(json.dumps(_backend_state(tokenizer)))
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        return lambda texts: [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(texts: list[str]) -> list[list[int]]:
        found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return found["input_ids"]

    return encode
