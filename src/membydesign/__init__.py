"""Memory by Design: state what a memory assumes, get its exact Bayesian filter as a PyTorch sequence layer.

The legend of letters, used in every shape: B batch, T time, H heads, D key size, M value size, G noise groups.
"""

from membydesign import layers, theory
from membydesign.belief import Belief
from membydesign.design import (
    Catalogue,
    Covariance,
    DampedRotation,
    Dense,
    Description,
    DesignModel,
    Diagonal,
    DiagonalDecay,
    Equation,
    Identity,
    LatentInput,
    MeanOnly,
    ObserveMemory,
    PerColumnReset,
    Reset,
    RowDrift,
    ScalarDecay,
    StateSize,
    StepParameter,
    Transition,
    Write,
    catalogue,
    real_rows,
)
from membydesign.errors import FilterError, KernelError, KernelWarning, NonFiniteError, NotPositiveDefiniteError
from membydesign.layers import MemoryLayer, make_layer
from membydesign.ops import Filtered, filter_sequence, filter_step

__version__ = "0.1.0"

__all__ = [
    "Belief",
    "Catalogue",
    "Covariance",
    "DampedRotation",
    "Dense",
    "Description",
    "DesignModel",
    "Diagonal",
    "DiagonalDecay",
    "Equation",
    "FilterError",
    "Filtered",
    "Identity",
    "KernelError",
    "KernelWarning",
    "LatentInput",
    "MeanOnly",
    "MemoryLayer",
    "NonFiniteError",
    "NotPositiveDefiniteError",
    "ObserveMemory",
    "PerColumnReset",
    "Reset",
    "RowDrift",
    "ScalarDecay",
    "StateSize",
    "StepParameter",
    "Transition",
    "Write",
    "catalogue",
    "filter_sequence",
    "filter_step",
    "layers",
    "make_layer",
    "real_rows",
    "theory",
]
