"""What a memory assumes: a `DesignModel` is a transition, a write and a covariance; the catalogue has Table 1."""

from membydesign.design.catalogue import Catalogue, catalogue
from membydesign.design.covariance import Covariance, Dense, Diagonal, MeanOnly, PerColumnReset, Reset
from membydesign.design.describe import Description, state_formula
from membydesign.design.equations import Equation, StateSize, StepParameter
from membydesign.design.model import DesignModel
from membydesign.design.transition import (
    DampedRotation,
    DiagonalDecay,
    Identity,
    RowDrift,
    ScalarDecay,
    Transition,
    real_rows,
)
from membydesign.design.write import LatentInput, ObserveMemory, Write

__all__ = [
    "Catalogue",
    "Covariance",
    "DampedRotation",
    "Dense",
    "Description",
    "DesignModel",
    "Diagonal",
    "DiagonalDecay",
    "Equation",
    "Identity",
    "LatentInput",
    "MeanOnly",
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
    "real_rows",
    "state_formula",
]
