"""examples/context_parallel.py: a model trained in two processes, under torchrun, has the losses of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "context_parallel.py"


def test_losses_are_those_of_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    options = ["--tokens", "96", "--steps", "2"]
    result = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    losses = re.findall(r"loss ([\d.]+) in 2 processes, ([\d.]+) in one", result.stdout)
    assert len(losses) == 2
    for split, whole in losses:
        assert float(split) == pytest.approx(float(whole), abs=1e-4)
