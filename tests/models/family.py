"""Tiny models of every layer, and of hybrids, for the tests of models."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from membydesign.layers import LAYERS
from membydesign.models import MemoryConfig, MemoryForCausalLM

VOCABULARY = 61
OPTIONS: dict[str, dict[str, Any]] = {"kda_style": {"short_convolution": 4}}
"""Options that tests give to a layer, by its name."""

SHAKEN = {"hyena": 0.05}
"""How far parameters are moved, where it is not 0.2: rough filters let states grow a thousandfold, and a Fourier
transform in float32 errs by parts of the largest."""

_WANTED = [
    ("bayesian_layer", "attention"),
    ("bayesian_layer", "gated_deltanet_style", "mamba2_style"),
    ("bayesian_layer", "gated_deltanet", "mamba2"),
]
HYBRIDS = {"+".join(names): list(names) for names in _WANTED if set(names) <= set(LAYERS)}
FAMILY: dict[str, list[str]] = {**{name: [name] * 2 for name in LAYERS}, **HYBRIDS}
"""The layers of a model, by the name of the test's case."""


def tiny_config(layers: str | list[str] = "bayesian_layer", **more: Any) -> MemoryConfig:
    names = [layers] * 2 if isinstance(layers, str) else list(layers)
    options = {name: OPTIONS[name] for name in dict.fromkeys(names) if name in OPTIONS}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    ties = {"tie_word_embeddings": False, "pad_token_id": 0}
    return MemoryConfig(**{"layers": names, "layer_options": options, **sizes, **ties, **more})


def shaken(model: Any, seed: int = 0) -> Any:
    """With every parameter moved off its starting value, so that no two tokens are equally likely."""
    generator = torch.Generator().manual_seed(seed)
    size = min(SHAKEN.get(name, 0.2) for name in model.config.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def fresh_model(layers: str | list[str] = "bayesian_layer", **more: Any) -> Any:
    """A model to change at will."""
    torch.manual_seed(0)
    return shaken(MemoryForCausalLM(tiny_config(layers, **more)))


@cache
def model_of(case: str) -> Any:
    """The model of a case, in evaluation mode; shared among tests, so not to be changed."""
    return fresh_model(FAMILY[case])


def some_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(rows: list[Tensor], side: str = "left") -> tuple[Tensor, Tensor]:
    """Rows of several lengths as one batch, and its mask; padding is an ordinary token, which only the mask tells."""
    longest = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask
