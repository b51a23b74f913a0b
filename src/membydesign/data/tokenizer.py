"""Tokenizers: load one by name, or train a byte-level BPE on a corpus."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

from membydesign.data.text import need
from membydesign.errors import check_whole_number
from membydesign.files import hub_name, partial_folder, read_json, to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from membydesign.data.text import Corpus

BOS = "<|bos|>"
"""Token before every document, for tokenizers trained here; it also ends the previous document."""

BYTES = 256

DIGITS = {1: "single tokens", 3: "groups of three"}
"""How numbers are split. It is recorded in `TRAINED_ON`, because older tokenizers have no such rule."""

TRAINED_ON = "trained_on.json"
"""File in the folder of a tokenizer trained here: its corpus and vocabulary size."""


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load a Transformers tokenizer.

    Args:
        name: name on the Hugging Face Hub, for example "fla-hub/gla-1.3B-100B" or "hub:gpt2", or a folder. Code
            shipped with a tokenizer is never executed.
    """
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        raise ValueError(f"name: expected the name or folder of a tokenizer, got {name!r}")
    transformers = need("transformers", "a tokenizer")
    try:
        on_the_hub = hub_name("name", name)
        return transformers.AutoTokenizer.from_pretrained(on_the_hub or str(name), trust_remote_code=False)
    except Exception as error:  # Transformers, the Hub and the network raise errors of many types
        raise ValueError(
            f"name: expected a tokenizer that can be read, got {str(name)!r}: {type(error).__name__}: {error}"
        ) from error


def train_tokenizer(corpus: Corpus, vocab_size: int, folder: Path, digits: int = 1) -> PreTrainedTokenizerBase:
    r"""Train a byte-level BPE, like GPT-2's but with a rule for numbers; `AutoTokenizer` can load it.

    Training is deterministic for any number of threads. If the folder already has a tokenizer of this corpus and size,
    it is loaded; one with another corpus, size or digit rule is replaced; other contents raise an error.

    Tokenisation is lossless: no character is unknown. The tokenizer puts BOS first, unless told otherwise.

    Args:
        corpus: training split; never the text that a model is tested on.
        vocab_size: vocabulary size V: 256 bytes, BOS, and merges.
        folder: folder of the tokenizer.
        digits: maximum digits per token. With 1 every digit is a token. With 3 numbers are split from the left into
            groups of three, as in Llama 3, and each of the 1,110 groups is a token, however rare.
    """
    if digits not in DIGITS:
        raise ValueError(f"digits: expected one of {', '.join(map(str, DIGITS))}, got {digits!r}")
    groups = ["".join(each) for size in range(2, digits + 1) for each in product("0123456789", repeat=size)]
    check_whole_number("vocab_size", vocab_size, BYTES + 1 + len(groups))
    tokenizers, transformers = need("tokenizers", "training a tokenizer"), need("transformers", "a tokenizer")
    trained_on = {"vocab_size": vocab_size, "digits": DIGITS[digits], "corpus": corpus.describe()}
    if _trained_on(folder) == trained_on:
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
            f"vocab_size: expected at most {most}, the largest vocabulary this text supports, got {vocab_size}"
        )
    if groups:
        tokenizer = _with_groups(tokenizer, groups)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, clean_up_tokenization_spaces=False
    )
    _save(wrapped, folder, trained_on)
    return load_tokenizer(folder)


def _with_groups(tokenizer: Any, groups: list[str]) -> Any:
    """Add tokens for groups of digits, into which numbers are split from the left."""
    state, longest = json.loads(tokenizer.to_str()), len(groups[-1])
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    for group in groups:
        vocabulary[group] = len(vocabulary)
        # Pairs are merged by rank, 00 before 70: 700 must be reachable from 70 and 0 as well as from 7 and 00.
        merges += [[group[:cut], group[cut:]] for cut in range(1, len(group))]
    cut = {"type": "Split", "pattern": {"Regex": f"[0-9]{{1,{longest}}}"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"]["pretokenizers"][0] = cut
    return type(tokenizer).from_str(json.dumps(state))


def _trained_on(folder: Path) -> dict[str, Any] | None:
    """Return what the tokenizer in a folder was trained on; None if the folder is missing or empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        return read_json(folder / TRAINED_ON)
    except (OSError, ValueError):
        raise ValueError(
            f"folder: expected a new folder, or one with a tokenizer trained by this package, and {folder} is neither"
        ) from None


def _save(tokenizer: PreTrainedTokenizerBase, folder: Path, trained_on: dict[str, Any]) -> None:
    """Save to a temporary folder and move it into place, so that `folder` is always complete."""
    partial = partial_folder(folder.with_name(f"{folder.name}.{os.getpid()}"))
    try:
        tokenizer.save_pretrained(partial)
        write_text(partial / TRAINED_ON, to_json(trained_on))
        if _trained_on(folder) not in (None, trained_on):
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except OSError:
        if _trained_on(folder) != trained_on:  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token plus one, including added tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise an error if a tokenizer has tokens that a model does not have.

    Args:
        tokenizer: tokenizer of the text.
        vocab_size: vocabulary size V of the model; it may be larger than the tokenizer's, and often is.
    """
    check_whole_number("vocab_size", vocab_size, 1)
    needed = vocabulary_size(tokenizer)
    if needed > vocab_size:
        raise ValueError(
            f"tokenizer: expected one with tokens below the model's vocab_size={vocab_size:,}, got one with "
            f"{needed:,} tokens ({tokenizer.name_or_path or type(tokenizer).__name__}); use the tokenizer that the "
            "model was trained with, or a model with that vocab_size"
        )


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that precedes documents."""
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        raise ValueError(
            f"tokenizer: expected one with a BOS token, got {tokenizer.name_or_path or type(tokenizer).__name__}, "
            "which has none; set tokenizer.bos_token, for example to tokenizer.eos_token"
        )
    return bos


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that determines the tokens of a text: vocabulary, merges, normalisation, special tokens, BOS."""
    if tokenizer.is_fast:
        state = _backend_state(tokenizer)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    state = {"tokenizer": state, "bos": bos_of(tokenizer), "split": bool(tokenizer.split_special_tokens)}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _backend_state(tokenizer: Any) -> dict[str, Any]:
    """Return the state of the `tokenizers` backend, without the truncation and padding set by the last caller."""
    return {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], list[list[int]]]:
    """Return the fastest available function from texts to tokens; it adds no BOS or other special tokens.

    Text that spells a special token becomes that token, as in Transformers, unless the tokenizer's
    `split_special_tokens` is set.
    """
    if tokenizer.is_fast:
        backend = need("tokenizers", "a tokenizer").Tokenizer.from_str(json.dumps(_backend_state(tokenizer)))
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        return lambda texts: [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(texts: list[str]) -> list[list[int]]:
        encoding = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoding["input_ids"]

    return encode
