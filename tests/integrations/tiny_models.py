"""Tiny Transformers models with recurrent layers, by the name of their family."""

from typing import Any

import torch

VOCABULARY = 97
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}

FIVE = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "mamba2")
OTHERS = ("bamba", "granitemoehybrid", "nemotron_h", "zamba2", "falcon_h1")


def _options(family: str) -> tuple[str, dict[str, Any]]:
    """The prefix of a family's classes and the options of its configuration."""
    if family == "qwen3_next":
        return "Qwen3Next", {**_LINEAR, **_KINDS, "linear_value_head_dim": 8, "head_dim": 16, "num_experts": 0}
    if family == "qwen3_5":
        return "Qwen3_5", {**_LINEAR, **_KINDS, "linear_value_head_dim": 16, "head_dim": 16}
    if family == "olmo_hybrid":
        return "OlmoHybrid", {**_LINEAR, **_KINDS, "linear_value_head_dim": 24}
    if family == "kimi_linear":
        ranks = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
        heads = {"linear_num_heads": 2, "linear_head_dim": 16}
        return "KimiLinear", {**ranks, **heads, **_KINDS, "mlp_layer_types": ["dense"] * 2}
    if family == "mamba2":
        return "Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}
    if family == "bamba":
        return "Bamba", {**_MAMBA, "attn_layer_indices": [1]}
    if family == "granitemoehybrid":
        kinds = {"layer_types": ["mamba", "attention"], "num_local_experts": 0}
        return "GraniteMoeHybrid", {**_MAMBA, **kinds, "shared_intermediate_size": 48}
    if family == "nemotron_h":
        sizes = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 8, "head_dim": 16}
        return "NemotronH", {**sizes, "n_groups": 2, "layers_block_type": ["mamba", "attention"]}
    if family == "zamba2":
        sizes = {"n_mamba_heads": 4, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 8}
        return "Zamba2", {**sizes, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1}
    if family == "falcon_h1":
        return "FalconH1", {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 16}
    raise KeyError(family)


def tiny(family: str, seed: int = 0, **more: Any) -> Any:
    """A causal language model in evaluation mode."""
    import transformers

    prefix, options = _options(family)
    config_class = getattr(transformers, f"{prefix}TextConfig" if family == "qwen3_5" else f"{prefix}Config")
    common = dict(_COMMON)
    if family == "mamba2":
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
            del common[name]
    if family == "nemotron_h":
        del common["num_hidden_layers"]
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix}ForCausalLM")(config_class(**{**common, **options, **more})).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
