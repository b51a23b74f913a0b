"""Put this library's kernels under the recurrent layers of a Transformers model, and take them away again."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import transformers

from membydesign.filter.native import build as native
from membydesign.filter.native import mean_pass
from membydesign.integrations.transformers import convolution, delta_rule, state_space

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import nn

VERSIONS = ("5.20", "5.21", "5.22", "5.23")
"""Versions of Transformers whose layers were read and tested."""

LAYERS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "mamba2": "Mamba2Mixer",
    "bamba": "BambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "zamba2": "Zamba2MambaMixer",
    "falcon_h1": "FalconH1Mixer",
}
"""The recurrent layers, by the name of their model in Transformers."""

REPLACEMENTS = {**delta_rule.REPLACEMENTS, **state_space.REPLACEMENTS, **convolution.REPLACEMENTS}
"""The functions that layers call by these names, and what they call instead."""


class Acceleration:
    """What `accelerate` did to a model, and the way back.

    As a context manager it removes itself at the end.

    Attributes:
        layers: names of the layers that run on this library's kernels.
    """

    def __init__(self, modules: dict[str, nn.Module], forwards: dict[type[nn.Module], FunctionType]) -> None:
        self.layers = tuple(modules)
        self._replaced = [(module, MethodType(forwards[type(module)], module)) for module in modules.values()]
        for module, forward in self._replaced:
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Give the layers their own functions back; harmless if repeated."""
        for module, forward in self._replaced:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
        self._replaced = []

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Acceleration({', '.join(self.layers)})"


def accelerate(model: nn.Module) -> Acceleration:
    """Run the Gated DeltaNet, KDA and Mamba-2 layers of a Transformers model on this library's CPU kernels.

    Forward, backward, prefill in pieces and decoding with a cache compute the same numbers, up to rounding. Packed
    sequences (`seq_idx`, `cu_seq_lens_q`), which Transformers' own CPU code refuses, are kept apart. Only these layer
    objects change: nothing of Transformers itself is patched, other models keep their functions, and `remove` leaves
    the model as it was. Tensors on other devices, and `torch.export`, still take the original code.

    Args:
        model: any module with layers of `LAYERS`, such as a `Qwen3NextForCausalLM` or a `Mamba2Model`.

    Returns:
        A handle: `remove()` restores the original functions, and so does the end of a `with` block.

    Raises:
        ValueError: if the model has no such layer, or one whose `forward` was replaced already.
        RuntimeError: if Transformers' version is unknown, or this machine has no native code.

    Examples:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "num_hidden_layers": 2}
        >>> model = Mamba2ForCausalLM(Mamba2Config(vocab_size=99, n_groups=1, **sizes))
        >>> with accelerate(model) as acceleration:
        ...     acceleration.layers
        ('backbone.layers.0.mixer', 'backbone.layers.1.mixer')
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a model of Transformers, got {type(model).__name__}")
    modules = {name: module for name, module in model.named_modules() if _is_known(module)}
    if not modules:
        raise ValueError(
            f"model: expected one with layers of {', '.join(LAYERS)} (Transformers), got {type(model).__name__} "
            "without any"
        )
    _check_version()
    if not native.available(mean_pass.SOURCE, torch.float32):
        raise RuntimeError("native code is unavailable on this machine (a warning said why), so nothing can be faster")
    for name, module in modules.items():
        if "forward" in module.__dict__:
            raise ValueError(
                f"model: expected layers with the forward of their class, got {name} with another (it is accelerated "
                "already, or hooks of a device map are on it)"
            )
    forwards = {kind: _forward(kind) for kind in {type(module) for module in modules.values()}}
    return Acceleration(modules, forwards)


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    family = kind.__module__.rpartition(".modeling_")[2]
    return LAYERS.get(family) == kind.__name__ and kind.__module__ == f"transformers.models.{family}.modeling_{family}"


def _check_version() -> None:
    version = transformers.__version__
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(
            f"transformers: expected version {' or '.join(VERSIONS)}, whose layers are known here, got {version}"
        )


def _forward(kind: type[nn.Module]) -> FunctionType:
    """The forward of a class on our functions.

    `force_accelerate_hooks`, its decorator, only serves hooks of device maps, which `accelerate` refuses.
    """
    ours = {}
    for name, function in replaced_functions(kind).items():
        if reason := REPLACEMENTS[name].why_not(function):
            raise RuntimeError(f"transformers {transformers.__version__}, {name} of {kind.__module__}: {reason}")
        ours[name] = REPLACEMENTS[name].instead_of(function)
    return forward_with(kind, ours)


def forward_with(kind: type[nn.Module], functions: dict[str, Callable[..., Any]]) -> FunctionType:
    """The code of a class's forward, which finds these functions by their names instead of those of its module."""
    original = inspect.unwrap(kind.forward)
    names = {**original.__globals__, **functions}
    forward = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    forward.__kwdefaults__ = original.__kwdefaults__
    forward.__qualname__, forward.__doc__ = original.__qualname__, original.__doc__
    return forward


def replaced_functions(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The functions of a layer that are replaced, by name."""
    original: Any = inspect.unwrap(kind.forward)
    return {name: original.__globals__[name] for name in original.__code__.co_names if name in REPLACEMENTS}
