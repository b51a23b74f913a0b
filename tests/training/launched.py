"""`accelerate launch launched.py FILE`: the losses of 20 steps, written by the first process."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

from membydesign.training import train
from training.problem import SETTINGS, batch_of, losses_of, model

if __name__ == "__main__":
    accelerator, losses = Accelerator(cpu=True), []
    settings = replace(SETTINGS, steps=20)
    train(
        model(), batch_of, losses_of, settings, seed=0, accelerator=accelerator, watch=lambda p: losses.append(p.loss)
    )
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps({"processes": accelerator.num_processes, "losses": losses}))
