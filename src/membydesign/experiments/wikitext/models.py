"""Build the models of the from-scratch comparison, with equal recurrent state and nearly equal weights."""

from __future__ import annotations

import torch

from membydesign.models import MemoryConfig, MemoryForCausalLM

ARMS = {
    "bayesian_layer": "Bayesian Layer",
    "gated_deltanet": "Gated DeltaNet",
    "mamba2": "Mamba-2",
}
"""The models that are compared, and what figures call them."""


def configuration(
    arm: str, *, vocab_size: int, layers: int = 4, num_heads: int = 4, head_dim: int = 128, dropout: float = 0.4
) -> MemoryConfig:
    """Return the configuration of a model, by default of the paper's size.

    The width is num_heads·head_dim. Every model keeps 2·H·D² numbers for each of `layers` layers: the Bayesian Layer a
    mean and a covariance, Gated DeltaNet values twice as wide as keys, Mamba-2 half as much in each of twice as many
    blocks, which have no MLP. The paper states these shapes and 16–18M weights beside the embedding; the widths of
    MLPs and the groups of Mamba-2 follow from that.

    Args:
        arm: a name of `ARMS`.
        vocab_size: of the tokenizer.
        layers: blocks of the Bayesian Layer and of Gated DeltaNet.
        num_heads: H.
        head_dim: D.
        dropout: of the hidden units of MLPs.
    """
    width = num_heads * head_dim
    match arm:
        case "bayesian_layer":
            blocks, heads, rows, hidden = layers, num_heads, head_dim, width * 15 // 4
            options = {"short_convolution": 4}
        case "gated_deltanet":
            blocks, heads, rows, hidden = layers, num_heads, head_dim, width * 11 // 4
            options = {"value_dim": 2 * head_dim}
        case "mamba2":
            blocks, heads, rows, hidden = 2 * layers, 4 * num_heads, head_dim // 2, 0
            options = {"value_dim": head_dim // 2, "num_key_heads": 2 * num_heads}
        case _:
            raise ValueError(f"arm: expected one of {', '.join(ARMS)}, got {arm!r}")
    return MemoryConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=blocks,
        layers=arm,
        num_heads=heads,
        head_dim=rows,
        layer_options={arm: options},
        intermediate_size=hidden,
        mlp_dropout=dropout,
    )


def recurrent_state(model: MemoryForCausalLM) -> int:
    """Count the numbers that all layers keep between two tokens, without the tails of convolutions."""
    sizes = [mixer.state_size() for mixer in model.model.mixers()]
    return sum(0 if size is None else size.recurrent for size in sizes)


def weights_beside_embedding(model: MemoryForCausalLM) -> int:
    """Count the weights of a model without its embedding, which the readout shares."""
    return sum(p.numel() for p in model.parameters()) - model.model.embeddings.weight.numel()


def make_model(config: MemoryConfig, seed: int) -> MemoryForCausalLM:
    """Build the untrained model."""
    torch.manual_seed(seed)
    return MemoryForCausalLM(config)
