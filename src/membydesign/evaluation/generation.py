"""Greedy generation in batches, with the model's cache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH_TOKENS = 16_384
"""Tokens per batch if no batch size is given."""


def batch_for(length: int, batch_size: int | None = None) -> int:
    """Return the number of sequences per batch for a sequence length."""
    return max(1, BATCH_TOKENS // length) if batch_size is None else batch_size


@torch.inference_mode()
def generate_greedy(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, padding: int = 0, use_cache: bool = True
) -> list[list[int]]:
    """Continue all prompts of a batch with the most likely tokens.

    Args:
        model: causal language model of Transformers.
        prompts: prompt tokens; shorter prompts are padded on the left and masked.
        new_tokens: maximum number of new tokens; generation ends earlier at an end token.
        padding: padding token.
        use_cache: whether to use the cache; without it, the whole text is processed again for every token.

    Returns:
        New tokens of each prompt, up to and not including the end token.
    """
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), padding)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    device = model.get_input_embeddings().weight.device
    with _plain(model, padding) as ends:
        out = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=use_cache,
        )
    return [_until(row, ends) for row in out[:, longest:].tolist()]


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


@contextmanager
def _plain(model: Any, padding: int) -> Iterator[list[int]]:
    """Disable penalties and temperatures saved with a checkpoint; yield the tokens that end a text."""
    from transformers import GenerationConfig

    own = model.generation_config
    ends = own.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=padding)
    try:
        yield ends
    finally:
        model.generation_config = own
