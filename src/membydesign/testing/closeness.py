"""Comparison of two tensors with one stated tolerance."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(ours: Tensor | None, reference: Tensor | None, tolerance: float, name: str = "") -> None:
    """Equal shape and dtype, and |ours − reference| ≤ tolerance · (1 + |reference|) everywhere."""
    assert ours is not None
    assert reference is not None
    torch.testing.assert_close(
        ours, reference, rtol=tolerance, atol=tolerance, msg=lambda message: f"{name or 'values'}: {message}"
    )
