"""Sequence layers to put into any network: the Bayesian Layer, its relatives in full, and foreign baselines."""

from membydesign.layers.base import LayerBelief, LayerStateSize, SequenceLayer, Uncertainty
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.filtered import FilterBelief, FilterLayer, StepInputs
from membydesign.layers.memory import MemoryLayer
from membydesign.layers.names import LAYERS, make_layer
from membydesign.layers.parameters import Drift, Gate, Learned, Variance

__all__ = [
    "LAYERS",
    "Drift",
    "FilterBelief",
    "FilterLayer",
    "Gate",
    "LayerBelief",
    "LayerStateSize",
    "Learned",
    "MemoryLayer",
    "SequenceLayer",
    "ShortConvolution",
    "StepInputs",
    "Uncertainty",
    "Variance",
    "make_layer",
]
