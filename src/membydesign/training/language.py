"""Language models as the training loop sees them: token ids in, the losses of next tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.models import MemoryForCausalLM

TOKENS_AT_A_TIME = 4096
"""Logits are made for so many tokens at a time, and again in the backward pass: all of them would be the largest tensor
of the run by far."""


class NextToken(nn.Module):
    """A language model that returns the losses of its predictions.

    Args:
        language_model: any that `membydesign.models` makes.
        tokens_at_a_time: for how many tokens logits are there at once.
    """

    def __init__(self, language_model: MemoryForCausalLM, tokens_at_a_time: int = TOKENS_AT_A_TIME) -> None:
        super().__init__()
        self.language_model, self.tokens_at_a_time = language_model, tokens_at_a_time

    def forward(self, input_ids: Tensor) -> Tensor:
        """Cross-entropies of tokens 2 to L, given those before, in nats: from [B,L] to [B,L−1]."""
        hidden = self.language_model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
        targets = input_ids[:, 1:]
        slices = zip(
            hidden.flatten(0, 1).split(self.tokens_at_a_time),
            targets.flatten().split(self.tokens_at_a_time),
            strict=True,
        )
        losses = [
            checkpoint(self._losses, h, y, use_reentrant=False) if torch.is_grad_enabled() else self._losses(h, y)
            for h, y in slices
        ]
        return torch.cat(losses).view(targets.shape)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.language_model.lm_head(hidden).float(), targets, reduction="none")


def next_token_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The losses of a batch with "input_ids", for the training loop, [B·(L−1)]."""
    return model(batch["input_ids"]).flatten()
