"""Language models as the training loop sees them: token ids in, the losses of next tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from membydesign.models.token_losses import next_token_losses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.models import MemoryForCausalLM


class NextToken(nn.Module):
    """A language model that returns the losses of its predictions.

    Args:
        language_model: any that `membydesign.models` makes.
    """

    def __init__(self, language_model: MemoryForCausalLM) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Cross-entropies of tokens 2 to L, given those before, in nats: from [B,L] to [B,L−1]."""
        return next_token_losses(self.language_model, {"input_ids": input_ids}).view(len(input_ids), -1)


def all_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """What a module makes of a batch, for the training loop: all of its losses, [N]."""
    return model(**batch).flatten()
