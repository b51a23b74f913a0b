"""Answers to needle-in-a-haystack questions: generation with a memory's cache, and without one."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from membydesign_bench.problem import Size
from membydesign_bench.timing import Job, Row, Settings, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (Size(4, 2, 1024, 32),)
"""B prompts, H heads, T tokens of context with the answer, D: a model of H·D wide with two blocks."""

WANTED = 5.0
"""How many times faster generation with the cache is to be, at the size above."""

NEW_TOKENS = 128
BYTES = 256
OURS = {"bayesian_layer": "Bayesian Layer", "gated_deltanet": "Gated DeltaNet"}
PEER = "the same without a cache"


def generation(settings: Settings) -> Iterator[Job]:
    """Tokens a second of whole answers, reading the prompt included."""
    if find_spec("transformers") is None:
        return
    for size in settings.sizes or SIZES:
        for name in OURS:
            yield Job(f"generation of {OURS[name]} at {size}", partial(_generation, name, size, settings.rounds))


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """As tokenizers of Transformers are called."""
        return {"input_ids": list(text.encode())}


def prompts(size: Size, new_tokens: int) -> list[list[int]]:
    """B questions, of T tokens with the answer."""
    from membydesign.evaluation.niah import NIAH
    from membydesign.evaluation.niah.haystack import read_essays

    made = NIAH(Bytes(), read_essays("embedded"), new_tokens)
    # A question takes some 500 bytes; of one that does not fit the end is taken, which is as long to read.
    samples = [made.sample("niah_single_1", max(size.T, 1024 + new_tokens), index) for index in range(size.B)]
    return [list(sample.token_ids)[-max(size.T - new_tokens, 1) :] for sample in samples]


def works(name: str, size: Size) -> tuple[dict[str, Callable[[], list[list[int]]]], int]:
    """Generation with and without a cache, and how many tokens each makes."""
    from membydesign.evaluation.generation import generate_greedy
    from membydesign.models import MemoryConfig, MemoryForCausalLM

    torch.manual_seed(0)
    config = MemoryConfig(
        vocab_size=BYTES, hidden_size=size.H * size.D, num_heads=size.H, num_hidden_layers=2, layers=name
    )
    model = MemoryForCausalLM(config).eval()
    new_tokens = min(NEW_TOKENS, max(size.T // 2, 1))
    questions = prompts(size, new_tokens)
    made: dict[str, Callable[[], list[list[int]]]] = {
        key: partial(generate_greedy, model, questions, new_tokens, use_cache=key == name) for key in (name, "peer")
    }
    return made, size.B * new_tokens


def _generation(name: str, size: Size, rounds: int) -> list[Row]:
    made, tokens = works(name, size)
    rates = {key: 1e3 * tokens / time for key, time in interleaved(made, rounds).items()}
    task = f"answers of {tokens // size.B} tokens"
    return [Row("generation", task, str(size), OURS[name], rates[name], "tokens/s", PEER, rates["peer"])]
