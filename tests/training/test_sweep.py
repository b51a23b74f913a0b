"""Sweeps: what is done is skipped, what was killed goes on to the same metrics, other settings are refused."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from membydesign.cli.experiment_runs import refusals
from membydesign.training import Run, SweepError, TrainSettings, sweep
from training.problem import SmallRun, runs, work

PROBLEM = Path(__file__).with_name("problem.py")


def test_runs_that_are_done_are_not_done_again(tmp_path):
    first = sweep(runs(20), tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.json")}
    seen = []
    assert sweep(runs(20), tmp_path, watch=lambda name, _: seen.append(name)) == first
    assert seen == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.json")} == stamps
    assert not list(tmp_path.glob("*/step-*")), "checkpoints of finished runs are removed"


@pytest.mark.slow
def test_workers_change_nothing(tmp_path):
    assert sweep(runs(20), tmp_path / "one") == sweep(runs(20), tmp_path / "two", workers=2)


@pytest.mark.slow
def test_killed_with_sigkill_and_restarted_it_ends_with_the_same_metrics(tmp_path):
    alone = sweep(runs(400), tmp_path / "alone")
    command = [sys.executable, str(PROBLEM), str(tmp_path / "killed"), "400", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROBLEM.parents[1]), *sys.path])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "killed").glob("*/step-*/place.json")):  # a checkpoint is there: in the middle of it
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert process.poll() is None, "the sweep ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=300)  # which its workers write to as well: they have ended too
    assert "Traceback" not in said
    assert len(list((tmp_path / "killed").glob("*/metrics.json"))) < 3
    assert sweep(runs(400), tmp_path / "killed") == alone


def test_a_folder_with_other_settings_is_refused(tmp_path):
    sweep(runs(20), tmp_path)
    message = (
        r"seed0 holds a run with other settings \(train\.steps: stored 20, requested 21\); .*choose another folder"
    )
    with pytest.raises(SweepError, match=message):
        sweep(runs(21), tmp_path)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_diverges_says_so_and_others_are_kept(tmp_path, workers, capfd):
    bad = Run("bad", SmallRun(0, TrainSettings(steps=5, batch_size=8, learning_rate=1e30, clip=None)), work)
    with pytest.raises(SweepError, match="bad: step .: expected a finite"):
        sweep([*runs(20), bad], tmp_path, workers=workers)
    assert len(list(tmp_path.glob("*/metrics.json"))) == 3
    assert multiprocessing.active_children() == []
    assert "Traceback" not in capfd.readouterr().err


def killed(_config, _directory, _watch) -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


class Awkward(Exception):
    """An error that cannot be unpickled, as those of some packages."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raises(_config, _directory, _watch) -> dict:
    raise Awkward("first", "second")


def test_a_worker_that_dies_is_named(tmp_path):
    message = r"dies: .* exit code -9 \(killed, perhaps because memory ran out\); rerun the same command to resume"
    with pytest.raises(SweepError, match=message):
        sweep([Run("dies", SmallRun(0), killed)], tmp_path, workers=2)
    assert multiprocessing.active_children() == []


def test_an_error_in_a_worker_comes_with_its_traceback(tmp_path):
    with pytest.raises(RuntimeError, match="Awkward: first and second") as error:
        sweep([Run("raises", SmallRun(0), raises)], tmp_path, workers=2)
    assert 'raise Awkward("first", "second")' in str(error.value.__cause__)


def test_names_must_differ(tmp_path):
    with pytest.raises(ValueError, match="runs: expected distinct names, got seed0, seed0"):
        sweep([*runs(5, 1), *runs(5, 1)], tmp_path)


def test_broken_metrics_are_named(tmp_path):
    sweep(runs(20), tmp_path)
    (tmp_path / "seed1" / "metrics.json").write_text("{")
    with pytest.raises(SweepError, match=r"seed1.metrics\.json: expected JSON"):
        sweep(runs(20), tmp_path)


def test_workers_under_a_launcher_are_refused(tmp_path, monkeypatch):
    """In a way that the command prints, and does not show as a failure of its own."""
    launched = SimpleNamespace(num_processes=2, is_main_process=True)
    monkeypatch.setattr(sys.modules[sweep.__module__], "processes", lambda: launched)
    with pytest.raises(SweepError, match="workers: expected 1 under `accelerate launch`.*, got 2"):
        sweep(runs(20), tmp_path / "x", workers=2)
    assert not (tmp_path / "x").exists()
    assert SweepError in refusals()
