"""`mbd kernels check`: the kernels run in the interpreter, and compile for GPUs without spilling."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.cli.kernels import command, compiled

pytest.importorskip("triton")


def check(*options: str) -> dict:
    """The command in a process of its own: this one interprets, and then Triton compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "membydesign.cli", "kernels", "check", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == bool(found["complaints"])
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_small_kernels_compile_without_spills(target):
    """The first layout of each kernel and size up to 64, with rotations, variance and evidence: the most of all."""
    found = check("--no-run", "--quick", "--sizes", "16,32,64", "--targets", target)
    assert not found["complaints"]
    assert {(x["kernel"], x["D"]) for x in found["compiled"]} == {
        (kernel, D) for kernel in ("forward", "backward", "step") for D in (16, 32, 64)
    }
    assert all(x["spills"] == 0 and x["shared"] <= compiled.TARGETS[target].shared for x in found["compiled"])


@pytest.mark.slow
@pytest.mark.parametrize("target", compiled.TARGETS)
def test_every_kernel_of_the_table_compiles(target):
    found = check("--no-run", "--targets", target)
    assert not found["complaints"]


def test_distances():
    result = CliRunner().invoke(app, ["kernels", "check", "--no-compile", "--sizes", "16", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["distances"]
    assert len(rows) == 8
    assert all(0 < row["of_allowed"] <= 1 for row in rows)


def test_stopped_it_leaves_no_process_behind(monkeypatch):
    started = []

    def endless(_command, **options):
        code = "import time; print('{}', flush=True); time.sleep(1000)"
        started.append(Popen([sys.executable, "-c", code], **options))
        return started[0]

    Popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", endless)
    rows = command._interpreted((16,))
    assert next(rows) == {}
    with pytest.raises(KeyboardInterrupt):
        rows.throw(KeyboardInterrupt)
    assert started[0].returncode is not None


def test_bad_options_are_refused():
    for options, message in (
        (["--sizes", "7"], "--sizes: expected some of 16, 32, 64, 128, 256, got 7"),
        (["--targets", "sm_1"], "--targets: expected some of sm_80"),
    ):
        result = CliRunner().invoke(app, ["kernels", "check", "--no-compile", *options])
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", " ")


def test_complaints():
    """More shared memory than a block has, and spills where none may be."""
    job = compiled.Job("forward", 64, compiled.table.FORWARD[64][0], "decay", "sm_80")
    assert compiled.Compiled(job, 255, 0, 1000, 0.1).complaint is None
    assert "8 bytes spilled" in (compiled.Compiled(job, 255, 8, 1000, 0.1).complaint or "")
    assert "shared memory" in (compiled.Compiled(job, 255, 0, 200_000, 0.1).complaint or "")
    assert compiled.Compiled(job._replace(D=128), 255, 8, 1000, 0.1).complaint is None
    assert compiled.Compiled(job._replace(target="gfx942"), 255, 8, 1000, 0.1).complaint is None
