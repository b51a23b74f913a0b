"""Greedy generation in batches, with a model's own cache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH_TOKENS = 16_384
"""How many tokens are read at a time where no batch size is given."""


def batch_for(length: int, batch_size: int | None = None) -> int:
    """How many sequences of a length are read at a time."""
    return max(1, BATCH_TOKENS // length) if batch_size is None else batch_size


@torch.inference_mode()
def generate_greedy(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, padding: int = 0, use_cache: bool = True
) -> list[list[int]]:
    """The likeliest token, again and again, for all prompts at once.

    Args:
        model: a causal language model of Transformers.
        prompts: tokens; shorter ones are padded on the left, which is masked out.
        new_tokens: how many to add, or fewer where the model says the end.
        padding: the token to pad with.
        use_cache: without one, the whole text is read anew for every token.

    Returns:
        The new tokens of each prompt, without the end and what is behind it.
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
    """Nothing but the model's distribution decides: no penalties or temperatures that came with a checkpoint.

    Gives the tokens that end a text.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    ends = own.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=padding)
    try:
        yield ends
    finally:
        model.generation_config = own
