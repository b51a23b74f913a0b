"""Layers by name: `make_layer("bayesian_layer", 64, num_heads=2, head_dim=32)`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from membydesign.design import (
    DampedRotation,
    Dense,
    Diagonal,
    DiagonalDecay,
    Identity,
    ObserveMemory,
    ScalarDecay,
)
from membydesign.errors import did_you_mean
from membydesign.layers.attention import SoftmaxAttention
from membydesign.layers.deltanet import DeltaNet
from membydesign.layers.gated_deltanet import GatedDeltaNet
from membydesign.layers.gla import GLA
from membydesign.layers.hyena import Hyena
from membydesign.layers.kda import KDA
from membydesign.layers.linear_attention import LinearAttention
from membydesign.layers.longhorn import Longhorn
from membydesign.layers.mamba2 import Mamba2
from membydesign.layers.memory import ON_SCAFFOLD, MemoryLayer
from membydesign.layers.parameters import Gate, Learned
from membydesign.layers.retnet import RetNet
from membydesign.layers.rwkv7 import RWKV7

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from membydesign.design import DesignModel, Transition
    from membydesign.layers.base import SequenceLayer

_TRANSITIONS: dict[str, Transition] = {
    "identity": Identity(),
    "scalar": ScalarDecay(),
    "diagonal": DiagonalDecay(),
    "rotation": DampedRotation(),
    "rotation_real": DampedRotation(noise="real"),
}
_DESIGN_OPTIONS = ("transition", "groups", "prior")
_ARCHITECTURES: dict[str, Callable[..., SequenceLayer]] = {
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KDA,
    "longhorn": Longhorn,
    "linear_attention": LinearAttention,
    "retnet": RetNet,
    "gla": GLA,
    "mamba2": Mamba2,
    "attention": SoftmaxAttention,
    "hyena": Hyena,
    "rwkv7": RWKV7,
}

_STYLES = [name for name in ON_SCAFFOLD if name.endswith("_style")]
LAYERS = (*(name for name in ON_SCAFFOLD if name not in _STYLES), *_ARCHITECTURES, *_STYLES)
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
        options: further arguments of the layer's class. For the Bayesian Layer and all on its scaffold also those of
            its design: `transition` ("identity", "scalar", "diagonal", "rotation", "rotation_real"), `groups` and
            `prior`. A noise may be written for JSON as {"learned": 0.05} or {"gate": 0.5}.

    Example:
        >>> make_layer("kda_style", 64, num_heads=2, head_dim=16, short_convolution=4).state_size()
        LayerStateSize(mean=512, covariance=0, convolution=288)
    """
    if name in _ARCHITECTURES:
        make = _ARCHITECTURES[name]
        return make(hidden_size, num_heads, head_dim, **_known(name, make, options))
    if name not in ON_SCAFFOLD:
        raise ValueError(f"layer: expected one of {', '.join(LAYERS)}, got {name!r}{did_you_mean(name, LAYERS)}")
    design, noises = ON_SCAFFOLD[name]
    options = _known(name, MemoryLayer, options, *_DESIGN_OPTIONS)
    design = _designed(design, **{option: options.pop(option, None) for option in _DESIGN_OPTIONS})
    for noise in ("process_noise", "write_noise", "prior_variance"):
        source = _source(noise, options.get(noise))
        options[noise] = noises.get(noise) if source is None else source
    return MemoryLayer(design, hidden_size, num_heads, head_dim, **options)


def _known(name: str, make: Callable[..., SequenceLayer], options: dict[str, Any], *more: str) -> dict[str, Any]:
    keywords = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in (*keywords, *more):
            expected = ", ".join((*keywords, *more))
            raise ValueError(f"{option}: expected an option of {name} ({expected}), got {option}={options[option]!r}")
    return dict(options)


def _designed(design: DesignModel, transition: str | None, groups: int | None, prior: float | None) -> DesignModel:
    """The design with another transition, number of noise groups, or prior variance."""
    if transition is not None:
        if transition not in _TRANSITIONS:
            near = did_you_mean(transition, _TRANSITIONS)
            raise ValueError(f"transition: expected one of {', '.join(_TRANSITIONS)}, got {transition!r}{near}")
        design = design.replace(transition=_TRANSITIONS[transition])
    if groups is not None:
        if not isinstance(design.write, ObserveMemory):
            raise ValueError(f"groups: expected None, since {design.title} has one write noise, got {groups!r}")
        design = design.replace(write=ObserveMemory(groups=groups))
    if prior is not None:
        if not isinstance(design.covariance, (Dense, Diagonal)):
            raise ValueError(f"prior: expected None, since {design.title} keeps no covariance, got {prior!r}")
        design = design.replace(covariance=type(design.covariance)(prior=prior))
    return design


def _source(name: str, value: Any) -> Any:
    """A source of variances, also from what JSON can hold."""
    if not isinstance(value, dict):
        return value
    if list(value) == ["learned"]:
        return Learned(value["learned"])
    if list(value) == ["gate"]:
        return Gate(value["gate"])
    raise ValueError(f'{name}: expected a number, {{"learned": …}} or {{"gate": …}}, got {value!r}')
