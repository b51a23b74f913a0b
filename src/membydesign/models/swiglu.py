"""The feed-forward part of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    r"""$W_d(\mathrm{SiLU}(W_g x) \odot W_u x)$, with dropout of the hidden units."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Of x, [B,T,hidden_size]."""
        return self.down_proj(self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))
