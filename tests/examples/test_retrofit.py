"""The measurements of docs/howto/retrofit.md, at a small size."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "retrofit.py"
TINY = ("--head-dim", "8", "--steps", "2", "--every", "1", "--batch", "2", "--length", "32", "--held-out", "1")


@pytest.mark.slow  # reading the text alone takes seconds
def test_it_prints_the_nmse_of_every_layer():
    words = [sys.executable, "-W", "error", str(SCRIPT), *TINY, "--choices", "rotation, fresh"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    name, *numbers = run.stdout.splitlines()
    assert name.startswith("rotation, fresh: ")
    for line in (name, *numbers[:2]):
        assert all(0 < float(x) < 10 for x in line.rpartition(": ")[2].split()), line
        assert len(line.rpartition(": ")[2].split()) == 4
