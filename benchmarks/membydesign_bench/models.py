"""Time whole models, training and decoding, compared with Transformers' Gated DeltaNet model of equal size."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from membydesign_bench.problem import Size
from membydesign_bench.timing import Job, Row, Settings, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (Size(4, 4, 512, 64), Size(1, 4, 2048, 64), Size(4, 4, 512, 128), Size(1, 4, 2048, 128))
DECODED = 16
"""Tokens for each reading of decoding."""

BLOCKS = 4
VOCABULARY = 2048
PEER = "Transformers' Gated DeltaNet model (Qwen3-Next)"
OURS = {
    "bayesian_layer": "Bayesian Layer",
    "bayesian_layer_rotating": "Bayesian Layer, damped rotations",
    "gated_deltanet": "Gated DeltaNet",
}


def models(settings: Settings) -> Iterator[Job]:
    """Models of H·D wide, as many blocks and tokens each; SwiGLU of 8/3 of the width, tied embeddings."""
    if find_spec("transformers") is None:
        return
    for size in settings.sizes or SIZES:
        yield Job(f"training of models at {size}", partial(_training, size, settings.rounds))
    for D in sorted({size.D for size in settings.sizes or SIZES}):
        yield Job(f"decoding of models with heads of {D}", partial(_decoding, Size(1, 4, 1, D), settings.rounds))


def made_models(size: Size) -> dict[str, Any]:
    """Ours by name, and the peer: the same width, blocks, heads and SwiGLU."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    from membydesign.models import MemoryConfig, MemoryForCausalLM

    H, D = size.H, size.D
    made: dict[str, Any] = {}
    for name in OURS:
        torch.manual_seed(0)
        config = MemoryConfig(
            vocab_size=VOCABULARY,
            hidden_size=H * D,
            num_heads=H,
            num_hidden_layers=BLOCKS,
            layers=name,
            layer_options={name: {"value_dim": D}},
        )
        made[name] = MemoryForCausalLM(config)
    torch.manual_seed(0)
    made["peer"] = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=VOCABULARY,
            hidden_size=H * D,
            intermediate_size=made["bayesian_layer"].config.intermediate_size,
            num_hidden_layers=BLOCKS,
            layer_types=["linear_attention"] * BLOCKS,
            linear_num_key_heads=H,
            linear_num_value_heads=H,
            linear_key_head_dim=D,
            linear_value_head_dim=D,
            num_experts=0,
            tie_word_embeddings=True,
        )
    )
    return made


def _rows(task: str, size: Size, works: dict[str, Callable[[], object]], rounds: int) -> list[Row]:
    times = interleaved(works, rounds)
    return [Row("models", task, str(size), OURS[name], times[name], "ms", PEER, times["peer"]) for name in OURS]


def _training(size: Size, rounds: int) -> list[Row]:
    made = made_models(size)
    tokens = torch.randint(VOCABULARY, (size.B, size.T), generator=torch.Generator().manual_seed(0))

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    works: dict[str, Callable[[], object]] = {
        name: partial(step, model.train(), torch.optim.AdamW(model.parameters(), 1e-4)) for name, model in made.items()
    }
    return _rows("training step", size, works, rounds)


def _decoding(size: Size, rounds: int) -> list[Row]:
    made = made_models(size)
    tokens = torch.randint(VOCABULARY, (size.B, DECODED), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def decode(model: Any, theirs: bool) -> None:
        cache = None
        for t in range(DECODED):
            # Given neither positions nor masks, their model asks its cache for a length that only attention keeps.
            known = {
                "position_ids": torch.tensor([[t]]),
                "attention_mask": {"full_attention": None, "linear_attention": None},
            }
            out = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True, **(known if theirs else {}))
            cache = out.past_key_values

    works: dict[str, Callable[[], object]] = {
        name: partial(decode, model.eval(), name == "peer") for name, model in made.items()
    }
    return _rows(f"decode {DECODED} tokens", size, works, rounds)
