"""The Bayesian Layer and the paper's ablations of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design.covariance import Dense
from membydesign.design.diagonal import Diagonal
from membydesign.design.model import DesignModel
from membydesign.design.reset import Reset
from membydesign.design.transition import DiagonalDecay
from membydesign.design.write import ObserveMemory

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

THIS_PAPER = "Dowling, Jeon, Savin & Park, Memory by Design: Probabilistic Sequence Layers"

BAYESIAN_LAYER = DesignModel(
    DiagonalDecay(),
    ObserveMemory(),
    Dense(),
    title="Bayesian Layer",
    citation=f"{THIS_PAPER}, Proposition 1",
    note="the paper's A_t is diagonal or a damped rotation: use replace(transition=…) for the others",
)

ROWS: dict[str, Design] = {
    "bayesian_layer": BAYESIAN_LAYER,
    "bayesian_layer_diagonal": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Diagonal(),
        title="Bayesian Layer, diagonal covariance",
        citation=f"{THIS_PAPER}, §4.1 (ablation)",
        note="the Bayesian Layer with every off-diagonal entry discarded after each update",
    ),
    "covariance_reset": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Reset(),
        title="Bayesian Layer, covariance reset",
        citation=f"{THIS_PAPER}, Proposition 2 (ablation)",
        note="the paper's ablation resets to its process noise: prior_variance λ_t = ℓ_t²",
    ),
}
