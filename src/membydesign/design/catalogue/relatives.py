"""Relatives: published architectures that the paper's Table 1 does not have, by what they assume or throw away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design.explained_alone import KalmanLinearAttention, Palimpsa
from membydesign.design.information import InformationDiagonal, Isotropic
from membydesign.design.model import DesignModel
from membydesign.design.penalty import PenalisedLeastSquares
from membydesign.design.statistics import KalmaNetMemory, MesaMemory
from membydesign.design.transition import DiagonalDecay
from membydesign.design.write import ObserveMemory

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

_KALMAN_DELTA = "Bui, Huang & Ying, Kalman Delta Networks: Uncertainty-aware Associative Memory, arXiv:2609.07816, 2026"

ROWS: dict[str, Design] = {
    "mesa_net": MesaMemory(),
    "gated_kalmanet": KalmaNetMemory(),
    "kla": KalmanLinearAttention(),
    "palimpsa": Palimpsa(),
    "kalman_delta_isotropic": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Isotropic(),
        title="Kalman Delta Network, isotropic",
        citation=_KALMAN_DELTA,
        note="KDA with a gate that follows from one precision per head, to which every write adds as if it had "
        "observed all D directions",
    ),
    "kalman_delta_diagonal": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        InformationDiagonal(),
        title="Kalman Delta Network, diagonal",
        citation=_KALMAN_DELTA,
        note="keeps the diagonal of the precision, to which every write adds D times its evidence; process noise is "
        "one number for each row",
    ),
    "vla": PenalisedLeastSquares(),
}
