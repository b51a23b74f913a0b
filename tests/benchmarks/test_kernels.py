"""`mbd kernels check`: the kernels run in the interpreter, and compile for GPUs without spilling."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kernel_checks import compiled, run
from membydesign.cli.app import app

pytest.importorskip("triton")

SLOW = [pytest.param(target, [16, 32, 64], marks=pytest.mark.slow) for target in ("sm_80", "sm_90")]


def check(*options: str) -> dict:
    """The command in a process of its own: this one interprets, and then Triton compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "membydesign.cli", "kernels", "check", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == bool(found["complaints"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("target", "sizes"), [("sm_90", [16]), *SLOW])
def test_small_kernels_compile_without_spills(target, sizes):
    """With rotations, variance and evidence, the most of all; `make kernels` compiles every size and layout."""
    chosen = ",".join(map(str, sizes))
    found = check("--no-run", "--variants", compiled.LARGEST, "--sizes", chosen, "--targets", target)
    assert not found["complaints"]
    assert found["triton"] == importlib.metadata.version("triton")
    assert {(x["kernel"], x["D"]) for x in found["compiled"]} == {
        (kernel, D) for kernel in ("forward", "backward", "step") for D in sizes
    }
    assert all(x["registers"] > 0 and x["shared"] <= compiled.TARGETS[target].shared for x in found["compiled"])


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
    rows = run._interpreted((16,))
    assert next(rows) == {}
    with pytest.raises(KeyboardInterrupt):
        rows.throw(KeyboardInterrupt)
    assert started[0].returncode is not None


def test_bad_options_are_refused():
    for options, message in (
        (["--sizes", "7"], "--sizes: expected some of 16, 32, 64, 128, 256, got 7"),
        (["--targets", "sm_1"], "--targets: expected some of sm_80"),
        (["--variants", "x"], "--variants: expected some of decay, rotation, tf32x3, float64, got x"),
    ):
        result = CliRunner().invoke(app, ["kernels", "check", "--no-compile", *options])
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", " ")


def test_complaints():
    """More shared memory than a block has, a failure, and spills in every layout where none may be."""
    job = compiled.Job("forward", 64, compiled.table.FORWARD[64][0], "decay", "sm_80")
    clean, spilling = compiled.Compiled(job, 255, 0, 1000, 0.1), compiled.Compiled(job, 255, 8, 1000, 0.1)
    assert compiled.complaints([clean]) == []
    assert "8 bytes spilled" in compiled.complaints([spilling])[0]
    assert compiled.complaints([spilling, clean]) == [], "autotuning leaves the layout that spills"
    assert "shared memory" in compiled.complaints([clean._replace(shared=200_000)])[0]
    failed = compiled.Compiled(job, failure="CompilationError: K >= 16")
    assert "does not compile: CompilationError: K >= 16" in compiled.complaints([failed, clean])[0]
    for change in ({"D": 128}, {"target": "gfx942"}, {"variant": "float64"}):
        assert compiled.complaints([spilling._replace(job=job._replace(**change))]) == []


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch):
    def fail(job):
        raise ValueError("at 1:2:\n\nexpected K >= 16")

    monkeypatch.setattr(compiled, "_compiled", fail)
    monkeypatch.delenv("TRITON_INTERPRET")
    options = ["--no-run", "--sizes", "16", "--targets", "sm_80", "--variants", "decay"]
    result = CliRunner().invoke(app, ["kernels", "check", *options])
    assert result.exit_code == 1
    assert "does not compile: ValueError: at 1:2: … expected K >= 16" in result.stdout
