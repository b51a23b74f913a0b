"""Build the models of MQAR: two sequence mixers and a linear readout, with recurrent states of equal size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.models import MemoryConfig, MemoryForCausalLM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.data.mqar import Examples
    from membydesign.layers.base import LayerStateSize

PAPER_STATE = 8192
"""Numbers that a recurrent layer of the paper keeps, at width 128 with heads of 32."""


@dataclass(frozen=True)
class Arm:
    """A model of the comparison.

    Attributes:
        title: its name in figures and tables.
        layer: the name of both layers.
        convolution: whether tokens reach their neighbours by a short convolution or a token shift.
        recurrent: whether its state has the same size at every length.
        options: layer options besides those that follow from the width.
    """

    title: str
    layer: str
    convolution: bool
    recurrent: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


ARMS = {
    "bayesian_layer": Arm("Bayesian Layer", "bayesian_layer", convolution=False, options={"short_convolution": 1}),
    "bayesian_layer_rotating": Arm(
        "Bayesian Layer, rotating", "bayesian_layer_rotating", convolution=False, options={"short_convolution": 1}
    ),
    "gated_deltanet": Arm("Gated DeltaNet", "gated_deltanet", convolution=True),
    "gated_deltanet_no_conv": Arm(
        "Gated DeltaNet, no conv.", "gated_deltanet", convolution=False, options={"short_convolution": None}
    ),
    "mamba2": Arm("Mamba-2", "mamba2", convolution=True),
    "mamba2_no_conv": Arm("Mamba-2, no conv.", "mamba2", convolution=False, options={"short_convolution": 1}),
    "rwkv7": Arm("RWKV-7", "rwkv7", convolution=True),
    "hyena": Arm("Hyena", "hyena", convolution=True, recurrent=False),
    "attention": Arm("Attention", "attention", convolution=False, recurrent=False),
}
"""The models by name. Mamba-2 without its convolution has one of width 1, as in the paper, which only scales. So have
the Bayesian Layers, for the SiLU behind it, which Gated DeltaNet also keeps on q, k and v: without it queries and keys
overlap as often negatively as positively, and recall takes several times as long to emerge."""


class MQARModel(nn.Module):
    """A language model whose logits are computed at the queries only.

    Args:
        language_model: two mixers, no MLPs.
    """

    def __init__(self, language_model: MemoryForCausalLM) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: Tensor, queries: Tensor) -> Tensor:
        """Compute logits at the positions `queries`, [B,D], of tokens [B,T]: [B,D,V].

        Only queries have labels, and a head over all positions would take most of the time.
        """
        hidden = self.language_model.model(input_ids, use_cache=False).last_hidden_state
        read = hidden.gather(1, queries[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.language_model.lm_head(read)

    def state_size(self) -> LayerStateSize | None:
        """Return how many numbers each layer keeps between two tokens; None if it grows with the sequence."""
        return self.language_model.model.mixers()[0].state_size()


def make_model(
    arm: str,
    width: int = 128,
    head_dim: int = 32,
    *,
    vocab_size: int = 8192,
    length: int = 128,
    embedding_range: float = 0.02,
    tied: bool = True,
) -> MQARModel:
    """Build the untrained model of an arm. Linear maps start with standard deviation 2/√width.

    Args:
        arm: a name of `ARMS`.
        width: the size of the residual stream.
        head_dim: rows of each head's memory; there are width/head_dim heads.
        vocab_size: V.
        length: the longest sequence, over which Hyena spreads its filters.
        embedding_range: the standard deviation with which embeddings start.
        tied: whether the readout shares the weights of the embedding.

    Raises:
        ValueError: also if a recurrent arm's state differs in size from the others.
    """
    if arm not in ARMS:
        raise ValueError(f"arm: expected one of {', '.join(ARMS)}, got {arm!r}")
    if width % head_dim:
        raise ValueError(f"width: expected a multiple of head_dim = {head_dim}, got {width}")
    layer = ARMS[arm].layer
    options = {**_sizes(layer, width, head_dim, length), **ARMS[arm].options}
    config = MemoryConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=2,
        layers=layer,
        num_heads=width // head_dim,
        head_dim=head_dim,
        layer_options={layer: options},
        intermediate_size=0,
        initializer_range=2 * width**-0.5,
        tie_word_embeddings=tied,
    )
    model = MQARModel(MemoryForCausalLM(config))
    with torch.no_grad():
        model.language_model.model.embeddings.weight.mul_(embedding_range * width**0.5 / 2)
    check_state(arm, model, width, head_dim)
    return model


def _sizes(layer: str, width: int, head_dim: int, length: int) -> dict[str, Any]:
    """Return the sizes that give a layer the state of the paper's table."""
    match layer:
        case "gated_deltanet" | "rwkv7":  # values twice as wide as keys
            return {"value_dim": 2 * head_dim}
        case "mamba2":  # an inner width of twice the width, in heads of one size
            return {"num_heads": 2 * width // head_dim, "value_dim": head_dim}
        case "hyena":
            return {"max_length": length}
        case _:
            return {}


def matched_state(width: int, head_dim: int) -> int:
    """Return the size of every recurrent layer's state: 8,192 at the paper's width 128 with heads of 32."""
    return 2 * width * head_dim


def check_state(arm: str, model: MQARModel, width: int, head_dim: int) -> None:
    """Raise ValueError if the state of a layer differs in size from that of the other arms."""
    expected = matched_state(width, head_dim) if ARMS[arm].recurrent else None
    for i, layer in enumerate(model.language_model.model.mixers()):
        size = layer.state_size()
        actual = None if size is None else size.recurrent
        if actual != expected:
            wording = "one that grows with the sequence" if expected is None else f"{expected} numbers"
            raise ValueError(
                f"state of {arm}: expected {wording} in each layer at width {width} with heads of {head_dim}, "
                f"got {actual} in layer {i}"
            )


def at_queries(examples: Examples) -> dict[str, Tensor]:
    """Return tokens up to the last query, [B,T], and positions, labels and rewrites of the D queries per row, [B,D].

    Nothing after the last query is ever read. All rows must have the same number of queries, as rows of one kind do.
    """
    queries = examples.queried.nonzero()[:, 1].view(len(examples), -1)
    return {
        "input_ids": examples.input_ids[:, : int(queries.max()) + 1],
        "queries": queries,
        "labels": examples.labels.gather(1, queries),
        "rewrites": examples.rewrites.gather(1, queries),
    }


def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy of every query, for the training loop, [B·D]."""
    logits = model(batch["input_ids"], batch["queries"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")


def parameters(model: nn.Module) -> int:
    """Count the weights of a model."""
    return sum(p.numel() for p in model.parameters())


def device(model: nn.Module) -> torch.device:
    """Return the device of a model."""
    return next(model.parameters()).device
