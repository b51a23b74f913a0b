"""Transformers' own models on this library's kernels: `accelerate` (docs/transformers.md).

Everything here is imported from `membydesign.integrations.transformers`; it needs `transformers` (the extra `models`).
"""

from membydesign.integrations.transformers.acceleration import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]
