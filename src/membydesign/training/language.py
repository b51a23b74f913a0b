"""Language models as the training loop sees them: token ids in, the losses of next tokens out."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor, nn

from membydesign.models.token_losses import next_token_losses
from membydesign.training.checkpoint import CheckpointError
from membydesign.training.processes import processes, whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from membydesign.models import MemoryForCausalLM


class NextToken(nn.Module):
    """A language model that returns the losses of its predictions.

    Args:
        language_model: any that `membydesign.models` makes.
    """

    def __init__(self, language_model: MemoryForCausalLM) -> None:
        super().__init__()
        self.language_model = language_model
        self._no_split_modules = language_model._no_split_modules  # what Accelerate shards by itself

    def forward(self, input_ids: Tensor) -> Tensor:
        """Cross-entropies of tokens 2 to L, given those before, in nats: from [B,L] to [B,L−1]."""
        losses = next_token_losses(self.language_model, {"input_ids": input_ids})
        return losses.view(len(input_ids), -1).clone()  # torch warns of sharded modules that return views

    def tie_weights(self) -> None:
        """Let embedding and head be one again; Accelerate asks for it when it has moved weights to shards."""
        self.language_model.tie_weights()


def all_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """What a module makes of a batch, for the training loop: all of its losses, [N]."""
    return model(**batch).flatten()


def save_model(model: MemoryForCausalLM, folder: Path, tokenizer: Path | None = None) -> None:
    """Save a model where `from_pretrained` finds it, whole or not at all, with the tokenizer of another folder.

    All processes must call this: shards are gathered, and the first process writes.

    Raises:
        CheckpointError: if it cannot be written, for instance on a full disk; what was at `folder` is as it was.
    """
    weights = {name: whole(value).contiguous() for name, value in model.state_dict().items()}
    if processes().is_main_process:
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            model.save_pretrained(partial, state_dict=weights)
            if tokenizer is not None:
                shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{folder}: the model could not be written ({error}); checkpoints beside it are intact, and the same "
                "command goes on from there once this is mended"
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    processes().wait_for_everyone()
