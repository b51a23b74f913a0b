"""The training loop of all experiments: schedule, checkpoints, exact resumption, sweeps."""

from membydesign.training.checkpoint import CheckpointError, CheckpointWarning
from membydesign.training.distributed import make_accelerator, processes, sharded
from membydesign.training.language import NextToken, all_losses, save_model
from membydesign.training.lock import FolderInUse
from membydesign.training.loop import Diverged, Progress, Trained, train
from membydesign.training.settings import TrainSettings
from membydesign.training.stages import measured, train_in_stages
from membydesign.training.sweep import METRICS, Run, SweepError, sweep

__all__ = [
    "METRICS",
    "CheckpointError",
    "CheckpointWarning",
    "Diverged",
    "FolderInUse",
    "NextToken",
    "Progress",
    "Run",
    "SweepError",
    "TrainSettings",
    "Trained",
    "all_losses",
    "make_accelerator",
    "measured",
    "processes",
    "save_model",
    "sharded",
    "sweep",
    "train",
    "train_in_stages",
]
