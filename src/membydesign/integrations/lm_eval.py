"""The model type `hf-accelerated` for lm-evaluation-harness: Transformers models on this library's kernels."""

from __future__ import annotations

from typing import Any


def register() -> type[Any]:
    """Make `hf-accelerated` known to lm-eval, before it starts (docs/howto/evaluation.md); return its class.

    It is lm-eval's own `hf`, with `membydesign.integrations.transformers.accelerate` called on the model. A model
    without a layer that it knows is refused.
    """
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    from membydesign.integrations.transformers import accelerate

    class AcceleratedLM(HFLM):
        """`hf` with our kernels under its recurrent layers; the same arguments."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.acceleration = accelerate(self.model)

    return register_model("hf-accelerated")(AcceleratedLM)
