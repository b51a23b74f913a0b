"""Language models for the training loop: token ids in, next-token losses out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor, nn

from membydesign.files import replacing_folder
from membydesign.models.token_losses import next_token_losses
from membydesign.training.checkpoint import CheckpointError
from membydesign.training.distributed import full_tensor, processes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from membydesign.models import MemoryForCausalLM


class NextToken(nn.Module):
    """Wrap a language model so that it returns the losses of its predictions.

    Args:
        language_model: model of `membydesign.models`.
    """

    def __init__(self, language_model: MemoryForCausalLM) -> None:
        super().__init__()
        self.language_model = language_model
        self._no_split_modules = language_model._no_split_modules  # read by Accelerate when it shards

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute the cross-entropies of tokens 2 to L given their prefixes, in nats, [B,L] to [B,L−1]."""
        losses = next_token_losses(self.language_model, {"input_ids": input_ids})
        return losses.view(len(input_ids), -1).clone()  # torch warns about sharded modules that return views

    def tie_weights(self) -> None:
        """Tie embedding and head again; Accelerate calls this after it has sharded the weights."""
        self.language_model.tie_weights()


def all_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Call a module on a batch and return all of its losses, [N], as the training loop expects."""
    return model(**batch).flatten()


def save_model(model: MemoryForCausalLM, folder: Path, tokenizer: Path | None = None) -> None:
    """Save a model for `from_pretrained`, atomically, optionally with a copy of the tokenizer in another folder.

    All processes must call this function, because shards are gathered; the first process writes.

    Raises:
        CheckpointError: if writing fails, for instance because the disk is full; `folder` is then unchanged.
    """
    weights = {name: full_tensor(value).contiguous() for name, value in model.state_dict().items()}
    if processes().is_main_process:
        try:
            with replacing_folder(folder) as partial:
                model.save_pretrained(partial, state_dict=weights)
                if tokenizer is not None:
                    shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: the model could not be written ({error}); the checkpoints are intact; fix this and rerun "
                "the same command to resume"
            ) from error
    processes().wait_for_everyone()
