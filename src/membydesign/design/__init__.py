"""What a memory assumes: any `Design`; `DesignModel` composes a transition, a write and a covariance; the catalogue."""

from membydesign.design.additive import AdditiveDesign, Sums
from membydesign.design.catalogue import Catalogue, catalogue
from membydesign.design.categories import CategoricalMemory, Votes
from membydesign.design.counts import CountMemory, Counts
from membydesign.design.covariance import Covariance, Dense, Gains, SequenceDrift, WholeMatrix
from membydesign.design.describe import Description
from membydesign.design.diagonal import Diagonal
from membydesign.design.hidden_markov import HiddenMarkov, StateBelief
from membydesign.design.model import DesignModel
from membydesign.design.protocol import Assumptions, Design, Flaw, Reading, Step, Written
from membydesign.design.reset import MeanOnly, PerColumnReset, Reset
from membydesign.design.retention import Discounted, Forgetting, ForgettingCovariance, PartialReset
from membydesign.design.schema import Equation, StateSize, StepParameter
from membydesign.design.sources import Gate, Learned, Spectrum
from membydesign.design.student_t import StudentTWrite
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
from membydesign.design.unknown_scale import UnknownScale
from membydesign.design.write import LatentInput, Observation, ObserveMemory, Write, WriteEvent

__all__ = [
    "AdditiveDesign",
    "Assumptions",
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
    "DiagonalDecay",
    "Discounted",
    "Equation",
    "Flaw",
    "Forgetting",
    "ForgettingCovariance",
    "Gains",
    "Gate",
    "HiddenMarkov",
    "Identity",
    "LatentInput",
    "Learned",
    "MeanOnly",
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
    "SequenceDrift",
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
    "real_rows",
]
