"""Layers by name: `make_layer("bayesian_layer", 64, num_heads=2, head_dim=32)`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from membydesign.design import DampedRotation, catalogue
from membydesign.layers.deltanet import DeltaNet
from membydesign.layers.gated_deltanet import GatedDeltaNet
from membydesign.layers.gla import GLA
from membydesign.layers.kda import KDA
from membydesign.layers.linear_attention import LinearAttention
from membydesign.layers.longhorn import Longhorn
from membydesign.layers.mamba2 import Mamba2
from membydesign.layers.memory import MemoryLayer
from membydesign.layers.parameters import Learned
from membydesign.layers.retnet import RetNet

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from membydesign.layers.base import SequenceLayer

_OWN = {
    "bayesian_layer": catalogue["bayesian_layer"],
    "bayesian_layer_rotating": catalogue["bayesian_layer"].replace(transition=DampedRotation(noise="real")),
    "bayesian_layer_diagonal": catalogue["bayesian_layer_diagonal"],
    "covariance_reset": catalogue["covariance_reset"],
}
_STYLES = {f"{name}_style": design for name, design in catalogue.items() if name not in _OWN}
_ARCHITECTURES: dict[str, Callable[..., SequenceLayer]] = {
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KDA,
    "longhorn": Longhorn,
    "linear_attention": LinearAttention,
    "retnet": RetNet,
    "gla": GLA,
    "mamba2": Mamba2,
}

LAYERS = (*_OWN, *_ARCHITECTURES, *_STYLES)
"""The names of all layers."""


def make_layer(name: str, hidden_size: int, num_heads: int, head_dim: int, **options: Any) -> SequenceLayer:
    """A layer by its name.

    The Bayesian Layer and its ablations, the architectures of Table 1 in full, foreign baselines, and "-style" layers:
    the updates of those architectures on the Bayesian Layer's scaffold.

    Args:
        name: one of `LAYERS`.
        hidden_size: the width of x and y.
        num_heads: H.
        head_dim: D.
        options: further arguments of the layer's class.

    Example:
        >>> make_layer("kda_style", 64, num_heads=2, head_dim=16, short_convolution=4).state_size()
        LayerStateSize(mean=512, covariance=0, convolution=288)
    """
    if name in _ARCHITECTURES:
        make = _ARCHITECTURES[name]
        return make(hidden_size, num_heads, head_dim, **_known(name, make, options))
    design = {**_OWN, **_STYLES}.get(name)
    if design is None:
        raise ValueError(f"layer: expected one of {', '.join(LAYERS)}, got {name!r}")
    options = _known(name, MemoryLayer, options)
    if name == "covariance_reset":  # the noises of the Bayesian Layer, and λ = ℓ²
        options = {"prior_variance": Learned(0.05), "write_noise": Learned(0.5), **options}
    return MemoryLayer(design, hidden_size, num_heads, head_dim, **options)


def _known(name: str, make: Callable[..., SequenceLayer], options: dict[str, Any]) -> dict[str, Any]:
    keywords = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in keywords:
            raise ValueError(f"{option}: expected an option of {name} ({', '.join(keywords)}), got one it has not")
    return options
