"""Sequence layers to put into any network: the Bayesian Layer, its relatives in full, and foreign baselines."""

from membydesign.layers.attention import AttentionBelief, SoftmaxAttention
from membydesign.layers.base import LayerBelief, LayerStateSize, SequenceLayer, Uncertainty
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.deltanet import DeltaNet
from membydesign.layers.filtered import FilterBelief, FilterLayer, StepInputs
from membydesign.layers.gated_deltanet import GatedDeltaNet
from membydesign.layers.gla import GLA
from membydesign.layers.hyena import Hyena, HyenaBelief
from membydesign.layers.kda import KDA
from membydesign.layers.linear_attention import LinearAttention
from membydesign.layers.longhorn import Longhorn
from membydesign.layers.mamba2 import Mamba2
from membydesign.layers.memory import MemoryLayer
from membydesign.layers.names import LAYERS, make_layer
from membydesign.layers.parameters import Drift, Gate, Learned, Variance
from membydesign.layers.retnet import RetNet
from membydesign.layers.rwkv7 import RWKV7, RWKV7Belief

__all__ = [
    "GLA",
    "KDA",
    "LAYERS",
    "RWKV7",
    "AttentionBelief",
    "DeltaNet",
    "Drift",
    "FilterBelief",
    "FilterLayer",
    "Gate",
    "GatedDeltaNet",
    "Hyena",
    "HyenaBelief",
    "LayerBelief",
    "LayerStateSize",
    "Learned",
    "LinearAttention",
    "Longhorn",
    "Mamba2",
    "MemoryLayer",
    "RWKV7Belief",
    "RetNet",
    "SequenceLayer",
    "ShortConvolution",
    "SoftmaxAttention",
    "StepInputs",
    "Uncertainty",
    "Variance",
    "make_layer",
]
