"""What a memory assumes: any `Design`; `DesignModel` composes a transition, a write and a covariance; the catalogue.

The parts of the Bayesian Layer and of Table 1 are imported with the package, all other designs on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from membydesign.design.catalogue import Catalogue, catalogue
from membydesign.design.covariance import Covariance, Dense, WholeMatrix
from membydesign.design.model import DesignModel
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Step, Written
from membydesign.design.reset import MeanOnly, PerColumnReset, Reset
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sequence_drift import Drift, Gains, SequenceDrift
from membydesign.design.sources import Gate, Learned, Spectrum
from membydesign.design.stationary import Stationary
from membydesign.design.transition import (
    DampedRotation,
    DecayAndRemoval,
    DiagonalDecay,
    Identity,
    Removal,
    RowDrift,
    RowNoise,
    ScalarDecay,
    Transition,
    real_rows,
)
from membydesign.design.write import LatentInput, Observation, ObserveMemory, Write, WriteEvent

if TYPE_CHECKING:
    from membydesign.design.additive import AdditiveDesign, Sums
    from membydesign.design.block import Block
    from membydesign.design.categories import CategoricalMemory, Votes
    from membydesign.design.counts import CountMemory, Counts
    from membydesign.design.delta_product import DeltaProduct
    from membydesign.design.describe import Description
    from membydesign.design.diagonal import Diagonal
    from membydesign.design.explained_alone import EntryBelief, EntryDesign, KalmanLinearAttention, Palimpsa
    from membydesign.design.feedback import KeyFeedback
    from membydesign.design.gated_delta_rule_2 import GatedDeltaRule2
    from membydesign.design.hidden_markov import HiddenMarkov, StateBelief
    from membydesign.design.information import InformationDiagonal, Isotropic, IsotropicBelief
    from membydesign.design.linear_recurrence import ChosenGain, LinearRecurrence, Recurrence, Writes
    from membydesign.design.low_rank import LowRank
    from membydesign.design.mlstm import MLSTMMemory, Normalised
    from membydesign.design.penalty import PenalisedLeastSquares, PenalisedMemory
    from membydesign.design.preconditioned import Curved, PreconditionedDelta
    from membydesign.design.retention import Discounted, Forgetting, ForgettingCovariance, PartialReset
    from membydesign.design.statistics import KalmaNetMemory, MesaMemory, RidgeDesign, Statistics
    from membydesign.design.student_t import StudentTWrite
    from membydesign.design.unknown_scale import UnknownScale

__all__ = [
    "AdditiveDesign",
    "Assumptions",
    "Block",
    "Catalogue",
    "CategoricalMemory",
    "ChosenGain",
    "CountMemory",
    "Counts",
    "Covariance",
    "Curved",
    "DampedRotation",
    "DecayAndRemoval",
    "DeltaProduct",
    "Dense",
    "Description",
    "Design",
    "DesignModel",
    "Diagonal",
    "DiagonalDecay",
    "Discounted",
    "Drift",
    "EntryBelief",
    "EntryDesign",
    "Equation",
    "Flaw",
    "Forgetting",
    "ForgettingCovariance",
    "Gains",
    "Gate",
    "GatedDeltaRule2",
    "HiddenMarkov",
    "Identity",
    "InformationDiagonal",
    "Isotropic",
    "IsotropicBelief",
    "KalmaNetMemory",
    "KalmanLinearAttention",
    "KeyFeedback",
    "LatentInput",
    "Learned",
    "LinearRecurrence",
    "LowRank",
    "MLSTMMemory",
    "MeanOnly",
    "MesaMemory",
    "Normalised",
    "Observation",
    "ObserveMemory",
    "Palimpsa",
    "PartialReset",
    "PenalisedLeastSquares",
    "PenalisedMemory",
    "PerColumnReset",
    "PreconditionedDelta",
    "Reading",
    "Recurrence",
    "Removal",
    "Reset",
    "RidgeDesign",
    "RowDrift",
    "RowNoise",
    "ScalarDecay",
    "SequenceDrift",
    "Spectrum",
    "StateBelief",
    "StateSize",
    "Stationary",
    "Statistics",
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
    "Writes",
    "Written",
    "catalogue",
    "real_rows",
]

_LATER = {
    "additive": ("AdditiveDesign", "Sums"),
    "block": ("Block",),
    "categories": ("CategoricalMemory", "Votes"),
    "counts": ("CountMemory", "Counts"),
    "delta_product": ("DeltaProduct",),
    "describe": ("Description",),
    "diagonal": ("Diagonal",),
    "explained_alone": ("EntryBelief", "EntryDesign", "KalmanLinearAttention", "Palimpsa"),
    "feedback": ("KeyFeedback",),
    "gated_delta_rule_2": ("GatedDeltaRule2",),
    "hidden_markov": ("HiddenMarkov", "StateBelief"),
    "information": ("InformationDiagonal", "Isotropic", "IsotropicBelief"),
    "linear_recurrence": ("ChosenGain", "LinearRecurrence", "Recurrence", "Writes"),
    "low_rank": ("LowRank",),
    "mlstm": ("MLSTMMemory", "Normalised"),
    "penalty": ("PenalisedLeastSquares", "PenalisedMemory"),
    "preconditioned": ("Curved", "PreconditionedDelta"),
    "retention": ("Discounted", "Forgetting", "ForgettingCovariance", "PartialReset"),
    "statistics": ("KalmaNetMemory", "MesaMemory", "RidgeDesign", "Statistics"),
    "student_t": ("StudentTWrite",),
    "unknown_scale": ("UnknownScale",),
}
"""The modules that are imported on first use, with their public names."""
_MODULES = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
