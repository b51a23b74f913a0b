"""Tiny teachers, in float64, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from membydesign.models import MemoryForCausalLM
from models.family import fresh_model, padded_batch, some_ids

GDN = {"value_dim": 6, "norm_eps": 1e-3}


def teacher_of(layers: int = 4, dtype: torch.dtype = torch.float64, **more: Any) -> MemoryForCausalLM:
    """A Gated DeltaNet of width 12 with 2 heads of 4, every parameter off its starting value."""
    sizes = {"hidden_size": 12, "num_heads": 2, "head_dim": 4, "intermediate_size": 10}
    options = {"gated_deltanet": {**GDN, **more.pop("options", {})}}
    return fresh_model(["gated_deltanet"] * layers, **{**sizes, "layer_options": options, **more}).to(dtype)


def mixer(model: MemoryForCausalLM, i: int) -> Any:
    return model.model.layers[i].mixer


def batches() -> dict[str, dict[str, Tensor]]:
    """The same three sequences, padded and packed; and a plain batch."""
    rows = [some_ids(n, seed=n) for n in (7, 4, 9)]
    ids, mask = padded_batch(rows, "right")
    packed = {"input_ids": torch.cat(rows)[None], "cu_seqlens": torch.tensor([0, 7, 11, 20])}
    return {
        "plain": {"input_ids": some_ids(2, 8)},
        "padded": {"input_ids": ids, "attention_mask": mask},
        "packed": packed,
    }
