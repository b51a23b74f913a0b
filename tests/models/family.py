"""Tiny models of every layer, and of hybrids, for the tests of models."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
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

UPDATES = [name for name in LAYERS if name.endswith("_style")]
"""Updates of other architectures on the scaffold of the Bayesian Layer: in models they differ from the architectures by
projections alone, so that slow tests are often enough for all but one of them."""

QUICK = [name for name in FAMILY if name not in UPDATES or name == "gated_deltanet_style"]
"""What every run of the tests has."""

KINDS = (
    *("bayesian_layer", "bayesian_layer_rotating", "unknown_scale", "low_rank", "count_memory", "hidden_markov"),
    *("gated_deltanet", "mamba2", "gated_deltanet_style", "deltaproduct", "mlstm", "mesa_net", "kla", "rwkv7"),
    *("hyena", "attention", *HYBRIDS),
)
"""One layer of each kind of belief and of each scaffold, for tests of what does not depend on the mathematics."""

WIDE = ("gated_kalmanet", "gated_kalmanet_style")
"""Models that tests run in float64: their reads solve systems that multiply a rounding error by ten thousand."""


def cases(names: Iterable[str] = FAMILY, quick: Iterable[str] = QUICK) -> pytest.MarkDecorator:
    """A test of models of these names, of which all but the quick ones are slow."""
    quick = set(quick)
    params = [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("case", params)


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
    model = fresh_model(FAMILY[case])
    return model.double() if case in WIDE else model


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
