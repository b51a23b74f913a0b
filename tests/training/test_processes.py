"""Two processes under `accelerate launch` take the steps of one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from membydesign.training import train
from training.problem import SETTINGS, batch_of, losses_of, model

SCRIPT = Path(__file__).with_name("launched.py")


def test_two_processes_give_the_losses_of_one(tmp_path):
    alone = []
    settings = replace(SETTINGS, steps=20)
    train(model(), batch_of, losses_of, settings, seed=0, watch=lambda p: alone.append(p.loss))
    # "multi_gpu" is Accelerate's word for torchrun; without a GPU the processes talk by gloo.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    command += [str(SCRIPT), str(tmp_path / "losses.json")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(command, env=environment, check=True, timeout=300)
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["processes"] == 2
    assert found["losses"] == pytest.approx(alone, abs=1e-4)
