"""`accelerate launch launched.py FILE FOLDER`: the losses of a language model's steps, written by the first process."""

import json
import sys
from pathlib import Path

from torch.distributed.tensor import DTensor

from membydesign.training import make_accelerator, train
from training.language import SETTINGS, batch_of, losses_of, model

if __name__ == "__main__":
    accelerator, losses, made = make_accelerator(), [], model()
    train(
        made,
        batch_of,
        losses_of,
        SETTINGS,
        seed=0,
        directory=Path(sys.argv[2]),
        until=10,
        rows_at_a_time=1,
        accelerator=accelerator,
        watch=lambda p: losses.append(p.loss),
    )
    if accelerator.is_main_process:
        found = {
            "processes": accelerator.num_processes,
            "sharded": all(isinstance(p, DTensor) for p in made.parameters()),
            "losses": losses,
        }
        Path(sys.argv[1]).write_text(json.dumps(found))
