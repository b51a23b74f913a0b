"""Tokenizers that need no download."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def bytes_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """256 tokens, one for each byte, and special ones after them: `bytes_tokenizer(eos_token="<end>")`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


@cache
def words_tokenizer(begin: bool = False) -> PreTrainedTokenizerFast:
    """500 pieces of words, learned from a little text; with a token before each text, and one behind it, if wanted."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([topics[name] for name in ("for", "class", "strings")], trainer)
    if begin:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
