"""The configuration of a language model whose layers are memories."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from membydesign.errors import check_whole_number
from membydesign.files import read_object
from membydesign.layers import SequenceLayer, layer_names, make_layer
from membydesign.layers.base import positive
from membydesign.layers.registry import module_of
from membydesign.models.adapters import register_with_peft
from membydesign.models.arguments import unknown
from membydesign.models.remote import AUTO_MAP, write_module

if TYPE_CHECKING:
    from os import PathLike

_UNDECLARED = {
    "add_cross_attention",
    "attn_implementation",
    "auto_map",
    "cross_attention_hidden_size",
    "experts_implementation",
    "finetuning_task",
    "is_decoder",
    "num_attention_heads",
    "per_layer_config",
    "prefix",
    "quantization_config",
    "sep_token_id",
    "task_specific_params",
    "tie_encoder_decoder",
    "tokenizer_class",
}
"""What Transformers takes, or once wrote, without an attribute of `PreTrainedConfig` that says so."""

_ELSEWHERE = {
    "d_ff": "intermediate_size",
    "d_model": "hidden_size",
    "depth": "num_hidden_layers",
    "dim": "hidden_size",
    "dropout": "mlp_dropout",
    "ffn_dim": "intermediate_size",
    "layer_norm_eps": "norm_eps",
    "layer_types": "layers",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "rms_norm_eps": "norm_eps",
    "width": "hidden_size",
}
"""Other libraries' names of arguments, and ours."""


LARGEST = 2**31 - 1
"""Largest size; torch counts elements in 64 bits, of which a product of two may need all."""


class MemoryConfig(PreTrainedConfig):
    """What a `MemoryModel` is made of.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: the width.
        num_hidden_layers: how many blocks; by default as many as `layers` has names, or 4.
        layers: the name of a layer (`membydesign.layers.layer_names()`), or one for each block: a hybrid is a list.
        num_heads: H of every layer.
        head_dim: D of every layer; default hidden_size / num_heads.
        layer_options: further arguments of layers, by the layer's name; `num_heads` and `head_dim` may be among them:
            `{"bayesian_layer": {"short_convolution": 4}, "attention": {"num_heads": 8, "head_dim": 64}}`.
        layer_modules: the modules that register layers of your own, by the layer's name; filled in by itself.
        intermediate_size: hidden units of each SwiGLU; default about 8/3 of the width; 0 for blocks without one.
        mlp_dropout: dropout of the SwiGLU's hidden units.
        norm_eps: ε of the blocks' norms and of the last one; a layer's own norm has `norm_eps` among its options.
        initializer_range: standard deviation of starting weights.
        tie_word_embeddings: whether the output layer shares the weights of the embedding.
        use_cache: whether to return beliefs, for generation.

    Examples:
        >>> config = MemoryConfig(vocab_size=256, hidden_size=64, layers=["bayesian_layer", "gla_style"])
        >>> config.num_hidden_layers, config.head_dim
        (2, 16)
    """

    model_type = "memory_by_design"
    keys_to_ignore_at_inference = ["past_key_values"]  # a list, to which the Trainer adds another
    attribute_map = {"num_attention_heads": "num_heads"}  # what Transformers calls it

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int | None = None
    layers: str | list[str] = "bayesian_layer"
    num_heads: int = 4
    head_dim: int | None = None
    layer_options: dict[str, dict[str, Any]] | None = None
    layer_modules: dict[str, str] | None = None
    intermediate_size: int | None = None
    mlp_dropout: float = 0.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if not _is_known(name):
                raise unknown(
                    name,
                    value,
                    "MemoryConfig",
                    _arguments(),
                    _ELSEWHERE.get(name),
                    "; options of a layer go into layer_options",
                )
        self._take_heads(kwargs.pop("num_attention_heads", None))
        if not isinstance(self.layers, (str, list, tuple)):
            raise ValueError(f"layers: expected a name or a list of names, got {self.layers!r}")
        if self.num_hidden_layers is None:
            self.num_hidden_layers = 4 if isinstance(self.layers, str) else len(self.layers)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
            positive(name, getattr(self, name))
        if isinstance(self.layers, str):
            self.layers = [self.layers] * self.num_hidden_layers
        if self.layer_options is None:
            self.layer_options = {}
        for name in ("layer_options", "layer_modules"):
            if not isinstance(getattr(self, name), (dict, type(None))):
                raise ValueError(f"{name}: expected a dict by names of layers, got {getattr(self, name)!r}")
        if self.intermediate_size is None:  # as many weights as four times the width would have without a gate
            self.intermediate_size = 64 * max(1, round(self.hidden_size * 8 / 3 / 64))
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"num_heads: expected a divisor of hidden_size = {self.hidden_size} (or give head_dim too), "
                    f"got {self.num_heads}"
                )
            self.head_dim = self.hidden_size // self.num_heads
        positive("head_dim", self.head_dim)
        check_whole_number("intermediate_size", self.intermediate_size, 0)
        for name in ("vocab_size", "hidden_size", "num_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) > LARGEST:
                raise ValueError(f"{name}: expected a whole number of at most {LARGEST:,}, got {getattr(self, name)}")
        super().__post_init__(**{**kwargs, "auto_map": dict(AUTO_MAP)})
        self._check()

    def _take_heads(self, other: int | None) -> None:
        """The number of heads by Transformers' name for it; before the size of a head follows from it."""
        if other is None:
            return
        if self.num_heads not in (MemoryConfig.num_heads, other):
            raise ValueError(f"num_attention_heads: expected num_heads = {self.num_heads}, its other name, got {other}")
        self.num_heads = other

    def _check(self) -> None:
        for name in self.layers:
            if not isinstance(name, str):
                raise ValueError(f"layers: expected names, got {name!r}")
        if len(self.layers) != self.num_hidden_layers:
            raise ValueError(
                f"layers: expected one name, or num_hidden_layers = {self.num_hidden_layers} names, "
                f"got {len(self.layers)}"
            )
        assert self.layer_options is not None
        for name in self.layer_options:
            if name not in self.layers:
                raise ValueError(f"layer_options: expected names among layers {sorted(set(self.layers))}, got {name!r}")
        for name, options in self.layer_options.items():
            if not isinstance(options, dict):
                raise ValueError(f"layer_options: expected a dict of options of {name}, got {options!r}")
            if "hidden_size" in options:
                raise ValueError(
                    f"layer_options: expected hidden_size = {self.hidden_size} from the model alone, "
                    f"got another for {name}: {options['hidden_size']!r}"
                )
            if options.get("value_residual"):
                raise ValueError(
                    f"layer_options: expected no value_residual for {name}, since blocks hand on no values, got True"
                )
        if not _is_number(self.mlp_dropout) or not 0 <= self.mlp_dropout < 1:
            raise ValueError(f"mlp_dropout: expected a number from 0 to below 1, got {self.mlp_dropout}")
        for name in ("norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        if self.pad_token_id is not None and (
            type(self.pad_token_id) is not int or self.pad_token_id >= self.vocab_size
        ):
            raise ValueError(
                f"pad_token_id: expected one below vocab_size = {self.vocab_size}, got {self.pad_token_id}"
            )
        for name in dict.fromkeys(self.layers):
            try:
                self.make_layer(name, device="meta")
            except RuntimeError as error:  # sizes whose product exceeds 64 bits
                raise ValueError(f"layers: expected {name} to have a size that torch can represent: {error}") from error
        modules = {name: module for name in dict.fromkeys(self.layers) if (module := module_of(name)) is not None}
        self.layer_modules = modules or None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a configuration; unknown keys, written by another version, are kept with a warning."""
        strange = {name: value for name, value in config_dict.items() if not _is_known(name)}
        if not strange:
            return super().from_dict(config_dict, **kwargs)
        warnings.warn(
            f"config.json: {', '.join(strange)}: unknown and without effect; another version may have written it",
            stacklevel=2,
        )
        result = super().from_dict({name: x for name, x in config_dict.items() if name not in strange}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for name, value in strange.items():
            setattr(config, name, value)
        return result

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str]) -> MemoryConfig:
        """Read the configuration in a file."""
        return cls.from_dict(read_object(Path(json_file)))

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict, and register this kind of model with PEFT."""
        register_with_peft(self.model_type)
        return super().to_dict()

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and beside it where the code is, for tools that do not import this package."""
        if not Path(save_directory).is_file():  # which Transformers refuses
            write_module(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: otherwise Transformers would copy this module into every folder it saves to."""

    def make_layer(self, name: str, device: torch.device | str | None = None) -> SequenceLayer:
        """Build the layer of a block, by name."""
        if name not in layer_names():
            module = (self.layer_modules or {}).get(name)
            hint = f"; import {module} first, the module that registered it" if module else ""
            if module == "__main__":
                hint = "; register it first, as the script that saved this configuration did"
            raise ValueError(f"layers: expected names among {', '.join(layer_names())}, got {name!r}{hint}")
        assert self.layer_options is not None
        sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim}
        with nullcontext() if device is None else torch.device(device):
            return make_layer(name, self.hidden_size, **{**sizes, **self.layer_options.get(name, {})})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@cache
def _arguments() -> tuple[str, ...]:
    """The arguments of a configuration that are not those of every configuration."""
    common = {field.name for field in fields(PreTrainedConfig)}
    return tuple(field.name for field in fields(MemoryConfig) if field.name not in common)


@cache
def _names() -> frozenset[str]:
    declared = (name for name in dir(PreTrainedConfig) if not callable(getattr(PreTrainedConfig, name)))
    everywhere = {*declared, *vars(PreTrainedConfig()), *vars(GenerationConfig())}
    return frozenset({*everywhere, *_UNDECLARED, *(field.name for field in fields(MemoryConfig))})


def _is_known(name: str) -> bool:
    """Whether a configuration may have it; what begins with an underscore is Transformers' own."""
    return name in _names() or name.startswith("_")
