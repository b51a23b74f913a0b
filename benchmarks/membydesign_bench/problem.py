"""The inputs of the benchmark: one set of random numbers for a size, from which every work takes what it needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """How large a problem is; value size M = D."""

    B: int
    H: int
    T: int
    D: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @staticmethod
    def parse(text: str) -> Size:
        """B,H,T,D as a user writes it."""
        try:
            B, H, T, D = (int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"--size: expected four whole numbers B,H,T,D such as 1,4,2048,64, got {text!r}") from None
        if min(B, H, T, D) < 1:
            raise ValueError(f"--size: expected numbers of at least 1, got {text!r}")
        return Size(B, H, T, D)


GRID = (
    Size(64, 4, 128, 16),
    Size(16, 4, 512, 32),
    Size(1, 4, 2048, 64),
    Size(1, 4, 2048, 128),
    Size(1, 4, 2048, 256),
)


class Problem:
    """Random inputs of one size, the same at every call and on every device.

    On a GPU q, k and v are in bfloat16, as models are trained there; all else is in float32.

    Attributes:
        size: B,H,T,D.
        device: where they are.
        q: queries, [B,T,H,D].
        k: keys of norm 1, [B,T,H,D].
        v: values, [B,T,H,D].
        log_decay: logarithms of decays between 0.9 and 1, [B,T,H].
        process_noise: ℓ², [B,T,H].
        write_noise: r², [B,T,H].
        memory: a mean to decode from, [B,H,D,D].
    """

    def __init__(self, size: Size, device: str = "cpu") -> None:
        self.size, self.device = size, device
        B, H, T, D = size
        self._generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(B, T, H, D, generator=self._generator) for _ in range(3))
        k = torch.nn.functional.normalize(k, dim=-1)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.q, self.k, self.v = (x.to(device, dtype) for x in (q, k, v))
        self.log_decay = -0.1 * self._uniform()
        self.process_noise = 0.01 + 0.1 * self._uniform()
        self.write_noise = 0.1 + self._uniform()
        self.memory = torch.randn(B, H, D, D, generator=self._generator).to(device)

    def log_decay_of_rows(self, rows: int) -> Tensor:
        """A decay for each of so many rows, like `log_decay`, [B,T,H,rows]."""
        self._generator.manual_seed(1)
        return -0.1 * self._uniform(rows)

    def angle(self) -> Tensor:
        """A turn for each pair of rows, in radians, [B,T,H,D/2]."""
        self._generator.manual_seed(2)
        return self._uniform(self.size.D // 2)

    def gate(self) -> Tensor:
        """β = λ / (r² + λ ‖k‖²) with λ = 1: the delta rule's gate that says the same as `write_noise`, [B,T,H]."""
        return 1 / (self.write_noise + self.k.float().square().sum(-1))

    def _uniform(self, *last: int) -> Tensor:
        B, H, T, _ = self.size
        return torch.rand(B, T, H, *last, generator=self._generator).to(self.device)
