"""Designs beyond the paper that change what is kept of the uncertainty of a linear-Gaussian memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.design.block import Block
from membydesign.design.catalogue.bayesian_layer import BAYESIAN_LAYER, THIS_PAPER
from membydesign.design.covariance import Dense
from membydesign.design.low_rank import LowRank
from membydesign.design.model import DesignModel
from membydesign.design.retention import Discounted, PartialReset
from membydesign.design.stationary import Stationary
from membydesign.design.student_t import StudentTWrite
from membydesign.design.transition import DiagonalDecay, Identity, ScalarDecay
from membydesign.design.unknown_scale import UnknownScale
from membydesign.design.write import ObserveMemory

if TYPE_CHECKING:
    from membydesign.design.protocol import Design

ROWS: dict[str, Design] = {
    "stationary_bayesian_layer": DesignModel(
        Stationary(DiagonalDecay()),
        ObserveMemory(),
        Dense(),
        title="Bayesian Layer, stationary drift",
        citation="Uhlenbeck & Ornstein, On the Theory of the Brownian Motion, Physical Review 1930 (the drift's law)",
        note="for contexts longer than those of training: memory relaxes to its prior, so that P_t never exceeds σ²I "
        "and gains do not depend on the position; Stationary(transition) does the same for any transition",
    ),
    "partial_reset": DesignModel(
        ScalarDecay(),
        ObserveMemory(),
        PartialReset(),
        title="Partial reset",
        citation=f"after {THIS_PAPER}, Propositions 1 and 2, whose two filters are its ends",
        note="a dial between two rows: retention γ_t = 0 is Gated DeltaNet, γ_t = 1 the Bayesian Layer with stationary "
        "process noise; use replace(transition=…) for KDA's decay of each row",
    ),
    "discounted": DesignModel(
        Identity(),
        ObserveMemory(),
        Discounted(),
        title="Discounted regression",
        citation="Jazwinski, Stochastic Processes and Filtering Theory, 1970; West & Harrison, Bayesian Forecasting "
        "and Dynamic Models, 1997 (discount factors)",
        note="recursive least squares with forgetting; directions that are never written grow without bound",
    ),
    "unknown_scale": UnknownScale(
        BAYESIAN_LAYER,
        citation="West & Harrison, Bayesian Forecasting and Dynamic Models, 1997 (unknown observational variance)",
        note="for streams whose noise has an unknown size: reads and gains are the Bayesian Layer's, and its variances "
        "are scaled by how well values were predicted; UnknownScale(base, …) wraps other designs, with discount=True "
        "for a scale that drifts",
    ),
    "robust_writes": DesignModel(
        DiagonalDecay(),
        StudentTWrite(),
        Dense(),
        title="Bayesian Layer, robust writes",
        citation="Meinhold & Singpurwalla, Robustification of Kalman Filter Models, JASA 1989 (Student-t noise)",
        note="for streams with outliers: the more surprising a write, the less it is trusted; filtered token by token, "
        "since the effective noise depends on values",
    ),
    "block_diagonal": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        Block(16),
        title="Bayesian Layer, block-diagonal covariance",
        citation="Boyen & Koller, Tractable Inference for Complex Stochastic Processes, UAI 1998 (factored beliefs)",
        note="16·D instead of D² numbers of covariance, for D divisible by 16; replace(covariance=Block(size)) has "
        "blocks of another size",
    ),
    "low_rank": DesignModel(
        DiagonalDecay(),
        ObserveMemory(),
        LowRank(16),
        title="Bayesian Layer, low-rank covariance",
        citation="Pham, Verron & Roubaud, Singular evolutive extended Kalman filter, J. Marine Systems 1998 "
        "(covariances of low rank)",
        note="16·D instead of D² numbers of covariance, for large D: memory relaxes to its prior, and only what 16 "
        "directions of writes have resolved is remembered; replace(covariance=LowRank(rank)) keeps another number",
    ),
}
