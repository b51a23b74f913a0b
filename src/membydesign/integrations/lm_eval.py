"""The model type `hf-accelerated` for lm-evaluation-harness: Transformers models on this library's kernels.

Import this module before lm-eval starts (docs/evaluation.md). It is lm-eval's own `hf`, with
`membydesign.integrations.transformers.accelerate` called on the model; a model without such layers is refused.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

from membydesign.integrations.transformers import accelerate


@register_model("hf-accelerated")
class AcceleratedLM(HFLM):
    """`hf` with our kernels under its recurrent layers; the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        accelerate(self.model)
