"""Two processes under `accelerate launch`, replicated or sharded, take the steps of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from membydesign.training import train
from training.language import SETTINGS, batch_of, losses_of, model

SCRIPT = Path(__file__).with_name("launched.py")

WAYS = {"ddp": "--multi_gpu", "fsdp": "--use_fsdp --fsdp_version 2"}
"""Accelerate's words; "multi_gpu" means torchrun, and without a GPU the processes talk by gloo."""


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_give_the_losses_of_one_and_one_goes_on_where_they_stopped(way, tmp_path):
    alone = []
    train(model(), batch_of, losses_of, SETTINGS, seed=0, watch=lambda p: alone.append(p.loss))
    options = f"{WAYS[way]} --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    command += [str(SCRIPT), str(tmp_path / "losses.json"), str(tmp_path / "run")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(command, env=environment, check=True, timeout=300)
    found = json.loads((tmp_path / "losses.json").read_text())
    assert (found["processes"], found["sharded"]) == (2, way == "fsdp")
    went_on = []
    train(
        model(),
        batch_of,
        losses_of,
        SETTINGS,
        seed=0,
        directory=tmp_path / "run",
        watch=lambda p: went_on.append(p.loss),
    )
    assert (len(found["losses"]), len(went_on)) == (10, 10)
    assert found["losses"] + went_on == pytest.approx(alone, abs=1e-4)
