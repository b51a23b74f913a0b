"""Where PEFT puts LoRA's adapters if nobody says: into the maps that lead into a memory and out of it."""

from __future__ import annotations

import sys

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "r_proj", "in_proj", "out_proj")
"""What these maps are called in `membydesign.layers`; every layer has some of them."""

_MAPPING = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def register_with_peft(model_type: str) -> None:
    """Give PEFT its default `target_modules`, if it is imported; an existing entry stays.

    PEFT has no other place for defaults, and importing it takes a second that most users have no use for. It asks a
    model for `config.to_dict()` before it looks for them, which is when this is called: the order of imports is free.
    """
    mapping = getattr(sys.modules.get("peft.utils"), _MAPPING, None)
    if isinstance(mapping, dict):
        mapping.setdefault(model_type, list(TARGETS))
