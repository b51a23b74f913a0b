"""Sequence layers to put into any network: the Bayesian Layer, its relatives in full, and foreign baselines."""

from membydesign.design import Gate, Learned
from membydesign.layers.attention import AttentionBelief, SoftmaxAttention
from membydesign.layers.base import LayerBelief, LayerStateSize, SequenceLayer, Uncertainty
from membydesign.layers.comba import Comba
from membydesign.layers.convolution import ShortConvolution
from membydesign.layers.deltanet import DeltaNet
from membydesign.layers.deltaproduct import GatedDeltaProduct
from membydesign.layers.filtered import FilterBelief, FilterLayer, StepInputs
from membydesign.layers.gated_deltanet import GatedDeltaNet
from membydesign.layers.gated_deltanet_2 import GatedDeltaNet2
from membydesign.layers.gated_kalmanet import GatedKalmaNet
from membydesign.layers.gla import GLA
from membydesign.layers.hyena import Hyena, HyenaBelief
from membydesign.layers.kalman_delta import DiagonalKalmanDelta, IsotropicKalmanDelta
from membydesign.layers.kalman_linear_attention import KLA
from membydesign.layers.kda import KDA
from membydesign.layers.linear_attention import LinearAttention
from membydesign.layers.longhorn import Longhorn
from membydesign.layers.mamba2 import Mamba2
from membydesign.layers.memory import MemoryLayer
from membydesign.layers.mesa_net import MesaNet
from membydesign.layers.mlstm import MLSTM
from membydesign.layers.palimpsa import PalimpsaLayer
from membydesign.layers.parameters import Drift, LearnedParameter
from membydesign.layers.preconditioned_deltanet import PreconditionedDeltaNet
from membydesign.layers.registry import LAYERS, layer_names, make_layer, register
from membydesign.layers.retnet import RetNet
from membydesign.layers.rwkv7 import RWKV7
from membydesign.layers.vla import VariationalLinearAttention

__all__ = [
    "GLA",
    "KDA",
    "KLA",
    "LAYERS",
    "MLSTM",
    "RWKV7",
    "AttentionBelief",
    "Comba",
    "DeltaNet",
    "DiagonalKalmanDelta",
    "Drift",
    "FilterBelief",
    "FilterLayer",
    "Gate",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedKalmaNet",
    "Hyena",
    "HyenaBelief",
    "IsotropicKalmanDelta",
    "LayerBelief",
    "LayerStateSize",
    "Learned",
    "LearnedParameter",
    "LinearAttention",
    "Longhorn",
    "Mamba2",
    "MemoryLayer",
    "MesaNet",
    "PalimpsaLayer",
    "PreconditionedDeltaNet",
    "RetNet",
    "SequenceLayer",
    "ShortConvolution",
    "SoftmaxAttention",
    "StepInputs",
    "Uncertainty",
    "VariationalLinearAttention",
    "layer_names",
    "make_layer",
    "register",
]
