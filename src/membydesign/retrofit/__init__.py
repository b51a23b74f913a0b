"""The paper's retrofit: replace layers of a pretrained Gated DeltaNet by Bayesian Layers, and distil from it.

`retrofit` builds the student, `phase_a_mask` and `phase_b_mask` select the trained parameters, `phase_a_losses` and
`phase_b_loss` compute the losses, and `PhaseBSchedule` weights them. `PhaseA` and `PhaseB` wrap the losses as modules
for the training loop (`membydesign.training`).
"""

from membydesign.retrofit.losses import (
    Boundary,
    PhaseALosses,
    PhaseBLoss,
    mean_cosine,
    nmse,
    phase_a_losses,
    phase_b_loss,
    recorded,
)
from membydesign.retrofit.masks import freeze, phase_a_mask, phase_b_mask
from membydesign.retrofit.phases import PhaseA, PhaseB
from membydesign.retrofit.replace import replaced_layers, retrofit
from membydesign.retrofit.schedule import PHASE_A, LossWeights, PhaseBSchedule, Stage

__all__ = [
    "PHASE_A",
    "Boundary",
    "LossWeights",
    "PhaseA",
    "PhaseALosses",
    "PhaseB",
    "PhaseBLoss",
    "PhaseBSchedule",
    "Stage",
    "freeze",
    "mean_cosine",
    "nmse",
    "phase_a_losses",
    "phase_a_mask",
    "phase_b_loss",
    "phase_b_mask",
    "recorded",
    "replaced_layers",
    "retrofit",
]
