"""Memory by Design: state what a memory assumes, get its exact Bayesian filter as a PyTorch sequence layer.

The legend of letters, used in every shape: B batch, T time, H heads, D key size, M value size, G noise groups.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from membydesign.belief import Belief, DiagonalBelief, ScaledBelief
from membydesign.design import (
    AdditiveDesign,
    Assumptions,
    Catalogue,
    CategoricalMemory,
    CountMemory,
    Counts,
    Covariance,
    DampedRotation,
    DecayAndRemoval,
    Dense,
    Description,
    Design,
    DesignModel,
    Diagonal,
    DiagonalDecay,
    Discounted,
    Equation,
    Flaw,
    Forgetting,
    ForgettingCovariance,
    Gains,
    Gate,
    HiddenMarkov,
    Identity,
    LatentInput,
    Learned,
    MeanOnly,
    Observation,
    ObserveMemory,
    PartialReset,
    PerColumnReset,
    Reading,
    Removal,
    Reset,
    RowDrift,
    RowNoise,
    ScalarDecay,
    SequenceDrift,
    Spectrum,
    StateBelief,
    StateSize,
    Step,
    StepParameter,
    StudentTWrite,
    Sums,
    Transition,
    UnknownScale,
    Votes,
    WholeMatrix,
    Write,
    WriteEvent,
    Written,
    catalogue,
    real_rows,
)
from membydesign.errors import FilterError, KernelError, KernelWarning, NonFiniteError, NotPositiveDefiniteError
from membydesign.filter import Filtered, filter_sequence, filter_step
from membydesign.state import Sizes

if TYPE_CHECKING:
    from membydesign import layers, theory
    from membydesign.layers import MemoryLayer, make_layer

__version__ = "0.1.0"

__all__ = [
    "AdditiveDesign",
    "Assumptions",
    "Belief",
    "Catalogue",
    "CategoricalMemory",
    "CountMemory",
    "Counts",
    "Covariance",
    "DampedRotation",
    "DecayAndRemoval",
    "Dense",
    "Description",
    "Design",
    "DesignModel",
    "Diagonal",
    "DiagonalBelief",
    "DiagonalDecay",
    "Discounted",
    "Equation",
    "FilterError",
    "Filtered",
    "Flaw",
    "Forgetting",
    "ForgettingCovariance",
    "Gains",
    "Gate",
    "HiddenMarkov",
    "Identity",
    "KernelError",
    "KernelWarning",
    "LatentInput",
    "Learned",
    "MeanOnly",
    "MemoryLayer",
    "NonFiniteError",
    "NotPositiveDefiniteError",
    "Observation",
    "ObserveMemory",
    "PartialReset",
    "PerColumnReset",
    "Reading",
    "Removal",
    "Reset",
    "RowDrift",
    "RowNoise",
    "ScalarDecay",
    "ScaledBelief",
    "SequenceDrift",
    "Sizes",
    "Spectrum",
    "StateBelief",
    "StateSize",
    "Step",
    "StepParameter",
    "StudentTWrite",
    "Sums",
    "Transition",
    "UnknownScale",
    "Votes",
    "WholeMatrix",
    "Write",
    "WriteEvent",
    "Written",
    "catalogue",
    "filter_sequence",
    "filter_step",
    "layers",
    "make_layer",
    "real_rows",
    "theory",
]


def __getattr__(name: str) -> Any:
    """Import layers and theory on first use: filters need neither."""
    if name in ("layers", "theory"):
        return import_module(f"membydesign.{name}")
    if name in ("MemoryLayer", "make_layer"):
        return getattr(import_module("membydesign.layers"), name)
    raise AttributeError(f"module 'membydesign' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
