"""The paper's retrofit: layers of a pretrained Gated DeltaNet become Bayesian Layers, and learn from it.

`retrofit` makes the student, `phase_a_mask` and `phase_b_mask` say what is trained, `phase_a_losses` and `phase_b_loss`
what is descended, `PhaseBSchedule` how the parts of it are weighed. The training loop is `membydesign.training`.
"""

from membydesign.retrofit.losses import (
    Boundary,
    PhaseALosses,
    PhaseBLoss,
    mean_cosine,
    next_token_losses,
    nmse,
    phase_a_losses,
    phase_b_loss,
    recorded,
)
from membydesign.retrofit.masks import freeze, phase_a_mask, phase_b_mask
from membydesign.retrofit.replace import replaced_layers, retrofit
from membydesign.retrofit.schedule import PHASE_A, LossWeights, PhaseBSchedule, Stage
from membydesign.retrofit.tokens import token_cross_entropies, token_divergences

__all__ = [
    "PHASE_A",
    "Boundary",
    "LossWeights",
    "PhaseALosses",
    "PhaseBLoss",
    "PhaseBSchedule",
    "Stage",
    "freeze",
    "mean_cosine",
    "next_token_losses",
    "nmse",
    "phase_a_losses",
    "phase_a_mask",
    "phase_b_loss",
    "phase_b_mask",
    "recorded",
    "replaced_layers",
    "retrofit",
    "token_cross_entropies",
    "token_divergences",
]
