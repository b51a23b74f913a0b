"""The configuration of a Gated DeltaNet of flash-linear-attention, as ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from membydesign.models.configuration import LARGEST, MemoryConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

MODEL_TYPE = "gated_deltanet"

# What is not in config.json has these values, as it had for whoever wrote it. They are those of all versions.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 21,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "use_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
    "norm_eps": 1e-6,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The function is the same whatever these say: how it is computed, or how it was trained. Where the norms are
# (norm_first, in 2024) is seen from the names of the tensors.
_WITHOUT_EFFECT = {
    *("attn_mode", "max_position_embeddings", "norm_first", "use_l2warp"),
    *("fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    *("model_type", "auto_map", "torch_dtype", "_name_or_path", "use_bfloat16", "torchscript", "tokenizer_class"),
    *("output_attentions", "is_decoder", "_attn_implementation_autoset", "_attn_implementation"),
}

# What is not supported, by the values that switch it off.
_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attn": (lambda x: not x, "no attention layers among the others (hybrids are not converted)"),
    "allow_neg_eigval": (lambda x: not x, "false: a gate up to 2 is not in the design"),
    "conv_bias": (lambda x: not x, "false: convolutions have no bias here"),
    "attnres_block_size": (lambda x: x is None, "null: residuals that attend to earlier blocks are not supported"),
    "hidden_act": (lambda x: x in ("swish", "silu"), "'swish'"),
    "quantization_config": (lambda x: not x, "null: weights as floating-point numbers"),
}


def _whole(x: Any) -> bool:
    return type(x) is int and 1 <= x <= LARGEST


def _id(x: Any) -> bool:
    return x is None or (type(x) is int and abs(x) <= LARGEST)


def _number(x: Any) -> bool:
    return type(x) in (int, float) and 0 < x <= LARGEST and math.isfinite(x)


DEEP = 256
"""Layers that are built, which takes a second, and then compared with the stored tensors by name."""

_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "conv_size"),
        _whole,
        "a whole number of at least 1",
    ),
    (("num_v_heads", "intermediate_size"), lambda x: x is None or _whole(x), "a whole number of at least 1, or null"),
    (("expand_v", "norm_eps", "initializer_range"), _number, "a number above 0"),
    (("hidden_ratio",), lambda x: x is None or _number(x), "a number above 0, or null"),
    (
        ("use_gate", "use_short_conv", "tie_word_embeddings", "use_cache"),
        lambda x: x is None or type(x) is bool,
        "true, false or null",
    ),
    (("pad_token_id", "bos_token_id"), _id, "a token or null"),
    (
        ("eos_token_id",),
        lambda x: _id(x) or (isinstance(x, list) and all(type(one) is int and _id(one) for one in x)),
        "a token, a list of tokens, or null",
    ),
)
"""What options may be: names, test, and how an error says it."""


def memory_config(options: Mapping[str, Any], ignore: Collection[str] = (), tensors: int | None = None) -> MemoryConfig:
    """Translate config.json of a Gated DeltaNet to a `MemoryConfig`.

    Args:
        options: the content of config.json.
        ignore: names of options not to look at.
        tensors: number of tensors in the checkpoint, if known; a model has at least one for each layer.

    Examples:
        >>> config = memory_config({"model_type": "gated_deltanet", "hidden_size": 64, "num_heads": 2, "head_dim": 24})
        >>> config.layers[0], config.intermediate_size, config.layer_options["gated_deltanet"]["value_dim"]
        ('gated_deltanet', 256, 48)
    """
    kind = options.get("model_type")
    if kind != MODEL_TYPE:
        own = " (which needs no conversion: MemoryForCausalLM.from_pretrained reads it)"
        raise ValueError(
            f"source: expected model_type {MODEL_TYPE!r} in config.json, got {kind!r}"
            f"{own if kind == MemoryConfig.model_type else ''}"
        )
    options = {name: value for name, value in options.items() if name not in ignore}
    read = {**_DEFAULTS, **{name: options[name] for name in _DEFAULTS if name in options}}
    problems = [
        f"{name}: expected {expected}, got {_shown(options[name])}"
        for name, (good, expected) in _ONLY.items()
        if name in options and not good(options[name])
    ]
    problems += [
        f"{name}: expected {expected}, got {_shown(read[name])}"
        for names, good, expected in _TYPES
        for name in names
        if not good(read[name])
    ]
    if tensors is not None and _whole(read["num_hidden_layers"]) and read["num_hidden_layers"] > max(tensors, DEEP):
        # Building that many layers, only to find that nothing is stored for them, could take minutes.
        problems.append(
            f"num_hidden_layers: expected at most {tensors}, the number of stored tensors, "
            f"got {read['num_hidden_layers']}"
        )
    known = {*_DEFAULTS, *_ONLY, *_WITHOUT_EFFECT, *PreTrainedConfig().to_dict()}
    problems += [
        f"{name}: expected no such option, got {_shown(value)} (ignore it, by name, if it does not change the outputs)"
        for name, value in options.items()
        if name not in known and value is not None
    ]
    value_dim = 0
    if not problems:
        value_dim = round(read["head_dim"] * read["expand_v"])
        if not 1 <= value_dim <= LARGEST or abs(read["head_dim"] * read["expand_v"] - value_dim) > 1e-5 * value_dim:
            problems.append(
                f"expand_v: expected head_dim·expand_v to be whole, got {read['head_dim']}·{read['expand_v']}"
            )
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(f"source: expected in config.json what can be converted, got{listed}")
    layer = {
        "value_dim": value_dim,
        "short_convolution": read["conv_size"] if read["use_short_conv"] else None,
        "output_gate": bool(read["use_gate"]),
        "norm_eps": read["norm_eps"],
    }
    heads = read["num_v_heads"] or read["num_heads"]
    if heads != read["num_heads"]:
        layer["num_key_heads"] = read["num_heads"]
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "norm_eps", "initializer_range", "use_cache")
    ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    return MemoryConfig(
        layers="gated_deltanet",
        num_heads=heads,
        layer_options={"gated_deltanet": layer},
        intermediate_size=_intermediate_size(read),
        tie_word_embeddings=bool(read["tie_word_embeddings"]),
        **{name: read[name] for name in (*same, *ids)},
    )


def _shown(value: Any) -> str:
    """Show a value of a foreign file, which may be of any length."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _intermediate_size(read: Mapping[str, Any]) -> int:
    """Return intermediate_size, or two thirds of hidden_ratio times the width, up to a multiple of 256."""
    if read["intermediate_size"] is not None:
        return read["intermediate_size"]
    ratio = 4 if read["hidden_ratio"] is None else read["hidden_ratio"]
    return 256 * -(-int(read["hidden_size"] * ratio * 2 / 3) // 256)
