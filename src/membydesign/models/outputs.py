"""What models return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.models.cache import MemoryCache


@dataclass
class MemoryModelOutput(ModelOutput):
    """What `MemoryModel` returns.

    Attributes:
        last_hidden_state: [B,T,hidden_size].
        past_key_values: beliefs to continue from.
        hidden_states: after the embedding and after each block, each [B,T,hidden_size].
        variances: of each layer, how unsure each read is, [B,T,H,G]; None for layers that have none.
        log_evidences: of each layer, how expected each write was, [B,T,H]; None for layers that have none.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: MemoryCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    variances: tuple[Tensor | None, ...] | None = None
    log_evidences: tuple[Tensor | None, ...] | None = None


@dataclass
class MemoryCausalLMOutput(ModelOutput):
    """What `MemoryForCausalLM` returns.

    Attributes:
        loss: mean cross-entropy of the next tokens.
        logits: [B,T,vocab_size].
        past_key_values: beliefs to continue from.
        hidden_states: as in `MemoryModelOutput`.
        variances: as in `MemoryModelOutput`.
        log_evidences: as in `MemoryModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: MemoryCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    variances: tuple[Tensor | None, ...] | None = None
    log_evidences: tuple[Tensor | None, ...] | None = None


@dataclass
class MemoryGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True` and `return_variance` or `return_evidence`.

    Entry i along the second axis belongs to the i-th generated token, as in `scores`: it is what the layers said of the
    read that the token was chosen from, and of the write just before. Entries after the end of a row mean nothing.

    Attributes:
        variances: of each layer, how unsure each read was, [B,new tokens,H,G]; None for layers that have none.
        log_evidences: of each layer, how expected each write was, [B,new tokens,H]; None for layers that have none.
    """

    variances: tuple[Tensor | None, ...] | None = None
    log_evidences: tuple[Tensor | None, ...] | None = None


@dataclass
class MemoryGenerateBeamOutput(GenerateBeamDecoderOnlyOutput):
    """As `MemoryGenerateOutput`, for beams: rows are the returned sequences, with zeros after an end.

    Attributes:
        variances: as in `MemoryGenerateOutput`.
        log_evidences: as in `MemoryGenerateOutput`.
    """

    variances: tuple[Tensor | None, ...] | None = None
    log_evidences: tuple[Tensor | None, ...] | None = None
