"""The configuration of a language model whose layers are memories."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from membydesign.layers import LAYERS, SequenceLayer, make_layer
from membydesign.layers.base import positive
from membydesign.models.remote import AUTO_MAP, write_module

if TYPE_CHECKING:
    from os import PathLike


class MemoryConfig(PreTrainedConfig):
    """What a `MemoryModel` is made of.

    Args:
        vocab_size: how many tokens there are.
        hidden_size: the width.
        num_hidden_layers: how many blocks; by default as many as `layers` has names, or 4.
        layers: the name of a layer (`membydesign.layers.LAYERS`), or one for each block: a hybrid is a list.
        num_heads: H of every layer.
        head_dim: D of every layer; default hidden_size / num_heads.
        layer_options: further arguments of layers, by the layer's name; `num_heads` and `head_dim` may be among them:
            `{"bayesian_layer": {"short_convolution": 4}, "attention": {"num_heads": 8, "head_dim": 64}}`.
        intermediate_size: hidden units of each SwiGLU; default about 8/3 of the width; 0 for blocks without one.
        mlp_dropout: dropout of the SwiGLU's hidden units.
        norm_eps: ε of the blocks' norms and of the last one; a layer's own norm has `norm_eps` among its options.
        initializer_range: standard deviation of starting weights.
        tie_word_embeddings: whether the output layer shares the weights of the embedding.
        use_cache: whether to return beliefs, for generation.

    Example:
        >>> config = MemoryConfig(vocab_size=256, hidden_size=64, layers=["bayesian_layer", "gla_style"])
        >>> config.num_hidden_layers, config.head_dim
        (2, 16)
    """

    model_type = "memory_by_design"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {"num_attention_heads": "num_heads"}  # what Transformers calls it

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int | None = None
    layers: str | list[str] = "bayesian_layer"
    num_heads: int = 4
    head_dim: int | None = None
    layer_options: dict[str, dict[str, Any]] | None = None
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
        if self.num_hidden_layers is None:
            self.num_hidden_layers = 4 if isinstance(self.layers, str) else len(self.layers)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
            positive(name, getattr(self, name))
        if isinstance(self.layers, str):
            self.layers = [self.layers] * self.num_hidden_layers
        if self.layer_options is None:
            self.layer_options = {}
        if self.intermediate_size is None:  # as many weights as four times the width would have without a gate
            self.intermediate_size = 64 * max(1, round(self.hidden_size * 8 / 3 / 64))
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"num_heads: expected a divisor of hidden_size = {self.hidden_size} (or give head_dim too), "
                    f"got {self.num_heads}"
                )
            self.head_dim = self.hidden_size // self.num_heads
        super().__post_init__(**{**kwargs, "auto_map": dict(AUTO_MAP)})
        self._check()

    def _check(self) -> None:
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
        if not 0 <= self.mlp_dropout < 1:
            raise ValueError(f"mlp_dropout: expected a number from 0 to below 1, got {self.mlp_dropout}")
        for name, least in (
            ("intermediate_size", "at least 0"),
            ("norm_eps", "above 0"),
            ("initializer_range", "above 0"),
        ):
            value = getattr(self, name)
            if not value >= 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"{name}: expected a number {least}, got {value!r}")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id: expected one below vocab_size = {self.vocab_size}, got {self.pad_token_id}"
            )
        for name in dict.fromkeys(self.layers):
            self.make_layer(name, device="meta")

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and beside it where the code is, for tools that do not import this package."""
        if not Path(save_directory).is_file():  # which Transformers refuses
            write_module(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: otherwise Transformers would copy this module into every folder it saves to."""

    def make_layer(self, name: str, device: torch.device | str | None = None) -> SequenceLayer:
        """The layer of a block, by name."""
        if name not in LAYERS:
            raise ValueError(f"layers: expected names among {', '.join(LAYERS)}, got {name!r}")
        assert self.layer_options is not None
        sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim}
        with nullcontext() if device is None else torch.device(device):
            return make_layer(name, self.hidden_size, **{**sizes, **self.layer_options.get(name, {})})
