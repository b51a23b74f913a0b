"""Layers by name: `make_layer("bayesian_layer", 64, num_heads=2, head_dim=32)`."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from membydesign.design import (
    DampedRotation,
    Design,
    DesignModel,
    DiagonalDecay,
    Gate,
    Identity,
    Learned,
    ScalarDecay,
)
from membydesign.errors import did_you_mean
from membydesign.layers.attention import SoftmaxAttention
from membydesign.layers.base import SequenceLayer
from membydesign.layers.comba import Comba
from membydesign.layers.deltanet import DeltaNet
from membydesign.layers.deltaproduct import GatedDeltaProduct
from membydesign.layers.gated_deltanet import GatedDeltaNet
from membydesign.layers.gated_deltanet_2 import GatedDeltaNet2
from membydesign.layers.gated_kalmanet import GatedKalmaNet
from membydesign.layers.gla import GLA
from membydesign.layers.hyena import Hyena
from membydesign.layers.kalman_delta import DiagonalKalmanDelta, IsotropicKalmanDelta
from membydesign.layers.kalman_linear_attention import KLA
from membydesign.layers.kda import KDA
from membydesign.layers.linear_attention import LinearAttention
from membydesign.layers.longhorn import Longhorn
from membydesign.layers.mamba2 import Mamba2
from membydesign.layers.memory import ON_SCAFFOLD, MemoryLayer
from membydesign.layers.mesa_net import MesaNet
from membydesign.layers.mlstm import MLSTM
from membydesign.layers.palimpsa import PalimpsaLayer
from membydesign.layers.preconditioned_deltanet import PreconditionedDeltaNet
from membydesign.layers.retnet import RetNet
from membydesign.layers.rwkv7 import RWKV7
from membydesign.layers.vla import VariationalLinearAttention

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from membydesign.design import Transition

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
    "preconditioned_deltanet": PreconditionedDeltaNet,
    "gated_deltanet_2": GatedDeltaNet2,
    "deltaproduct": GatedDeltaProduct,
    "comba": Comba,
    "mlstm": MLSTM,
    "attention": SoftmaxAttention,
    "hyena": Hyena,
    "rwkv7": RWKV7,
    "mesa_net": MesaNet,
    "gated_kalmanet": GatedKalmaNet,
    "kla": KLA,
    "palimpsa": PalimpsaLayer,
    "kalman_delta_isotropic": IsotropicKalmanDelta,
    "kalman_delta_diagonal": DiagonalKalmanDelta,
    "vla": VariationalLinearAttention,
}

_STYLES = [name for name in ON_SCAFFOLD if name.endswith("_style")]
LAYERS = (*(name for name in ON_SCAFFOLD if name not in _STYLES), *_ARCHITECTURES, *_STYLES)
"""The names of all built-in layers."""

_registered: dict[str, Callable[..., SequenceLayer] | Design] = {}
_modules: dict[str, str] = {}


def register(name: str, layer: Callable[..., SequenceLayer] | Design) -> None:
    """Give a layer of your own a name, so that `make_layer` and `MemoryConfig(layers=[…])` build it.

    A checkpoint stores the name and the module that called this function. Import that module before you load the
    checkpoint: nothing is imported for you.

    Args:
        name: any name that no built-in layer has. Registering a name again replaces its layer.
        layer: a `Design`, which becomes a `MemoryLayer`; or a class or function that takes
            (hidden_size, num_heads, head_dim) and keyword-only options, and returns a `SequenceLayer`.

    Examples:
        >>> register("my_memory", catalogue["bayesian_layer"].replace(covariance=Dense(prior=3.0)))
        >>> make_layer("my_memory", 64, num_heads=2, head_dim=16).state_size().recurrent
        1024
    """
    if not isinstance(name, str) or not name or name in LAYERS:
        raise ValueError(f"name: expected one that no built-in layer has, got {name!r}")
    if not isinstance(layer, Design) and not callable(layer):
        raise ValueError(f"layer: expected a Design, or a function that returns a SequenceLayer, got {layer!r}")
    _registered[name], _modules[name] = layer, sys._getframe(1).f_globals.get("__name__", "__main__")


def layer_names() -> tuple[str, ...]:
    """List the names of all layers: built-in ones first, then those of `register`."""
    return (*LAYERS, *_registered)


def module_of(name: str) -> str | None:
    """Return the module to import before a registered layer can be built; None for a built-in one."""
    return _modules.get(name)


def make_layer(name: str, hidden_size: int, num_heads: int, head_dim: int, **options: Any) -> SequenceLayer:
    """Build a layer by its name.

    Names are those of the Bayesian Layer and its ablations, memories of counts, categories and hidden states, the
    architectures of Table 1 in full, other baselines, "-style" layers (the updates of those architectures on the
    Bayesian Layer's scaffold), and layers that you register.

    Args:
        name: one of `layer_names()`.
        hidden_size: the width of x and y.
        num_heads: H.
        head_dim: D.
        options: further arguments of the layer's class. For the Bayesian Layer and all on its scaffold also those of
            its design: `transition` ("identity", "scalar", "diagonal", "rotation", "rotation_real"), `groups` and
            `prior`; `process_noise="stationary"` gives it noise that returns memory to that prior. A source may be
            written for JSON as {"learned": 0.05}, {"learned": 1e-5, "floor": 0} or {"gate": 0.5}.

    Examples:
        >>> make_layer("kda_style", 64, num_heads=2, head_dim=16, short_convolution=4).state_size()
        LayerStateSize(mean=512, covariance=0, convolution=288)
    """
    make = _ARCHITECTURES.get(name) or _registered.get(name)
    if make is not None and not isinstance(make, Design):
        layer = make(hidden_size, num_heads, head_dim, **_known(name, make, options))
        if not isinstance(layer, SequenceLayer):
            raise ValueError(f"layer: expected a SequenceLayer from what {name!r} names, got {type(layer).__name__}")
        return layer
    if make is None and name not in ON_SCAFFOLD:
        names = layer_names()
        raise ValueError(f"layer: expected one of {', '.join(names)}, got {name!r}{did_you_mean(name, names)}")
    design, sources = ON_SCAFFOLD[name] if make is None else (make, {})
    options = _known(name, MemoryLayer, options, *_DESIGN_OPTIONS)
    design = _designed(design, **{option: options.pop(option, None) for option in _DESIGN_OPTIONS})
    for noise in ("process_noise", "write_noise", "prior_variance"):
        source = _source(noise, options.get(noise))
        options[noise] = sources.get(noise) if source is None else source
    own = {key: _source(key, source) for key, source in (options.pop("sources", None) or {}).items()}
    return MemoryLayer(design, hidden_size, num_heads, head_dim, sources=own, **options)


def _known(name: str, make: Callable[..., SequenceLayer], options: dict[str, Any], *more: str) -> dict[str, Any]:
    parameters = inspect.signature(make).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(options)
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in (*keywords, *more):
            expected = ", ".join((*keywords, *more))
            raise ValueError(f"{option}: expected an option of {name} ({expected}), got {option}={options[option]!r}")
    return dict(options)


def _designed(design: Design, transition: str | None, groups: int | None, prior: float | None) -> Design:
    """Replace a design's transition, number of noise groups, or prior variance."""
    if transition is None and groups is None and prior is None:
        return design
    if design.wrapped is not None:
        return design.rewrap(_designed(design.wrapped, transition, groups, prior))
    if not isinstance(design, DesignModel):
        options = {"transition": transition, "groups": groups, "prior": prior}
        name, value = next((name, value) for name, value in options.items() if value is not None)
        raise ValueError(f"{name}: expected None, since {design.title} is not a DesignModel, got {value!r}")
    if transition is not None:
        if transition not in _TRANSITIONS:
            near = did_you_mean(transition, _TRANSITIONS)
            raise ValueError(f"transition: expected one of {', '.join(_TRANSITIONS)}, got {transition!r}{near}")
        design = design.replace(transition=design.transition.with_drift(_TRANSITIONS[transition]))
    if groups is not None:
        write = design.write.with_groups(groups)
        if write is None:
            raise ValueError(f"groups: expected None, since {design.title} has one write noise, got {groups!r}")
        design = design.replace(write=write)
    if prior is not None:
        covariance = design.covariance.with_prior(prior)
        if covariance is None:
            raise ValueError(f"prior: expected None, since {design.title} keeps no covariance, got {prior!r}")
        design = design.replace(covariance=covariance)
    return design


def _source(name: str, value: Any) -> Any:
    """Return a source of variances, also from its form in JSON."""
    if not isinstance(value, dict):
        return value
    if list(value) in (["learned"], ["learned", "floor"]):
        return Learned(value["learned"], **{key: value[key] for key in value if key == "floor"})
    if list(value) == ["gate"]:
        return Gate(value["gate"])
    raise ValueError(f'{name}: expected a number, {{"learned": …}} or {{"gate": …}}, got {value!r}')
