"""Ctrl-C and SIGTERM: runs leave checkpoints, everything ends, and the command that resumes is printed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.stoppable import SETTINGS, runs
from membydesign.cli import main
from membydesign.cli.app import app
from membydesign.cli.stopping import Stopped
from membydesign.training import checkpoint, sweep

SCRIPT = Path(__file__).with_name("stoppable.py")
PATIENCE = 300
"""Seconds, for machines that do much else; what is waited for takes a few."""


def environment(step_seconds: float) -> dict[str, str]:
    path = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "STEP_SECONDS": str(step_seconds)}


def wait_for(condition, what: str, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        assert process is None or process.poll() is None, f"mbd ended before {what}"
        time.sleep(0.01)


def started(out: Path) -> set[str]:
    """The runs that took steps."""
    return {path.parent.name for path in out.glob("runs/*/log.jsonl")}


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


class StoppedSweep:
    """`mbd reproduce` in a process group of its own, stopped in the third step of its first runs.

    Args:
        out: the folder of results.
        workers: of the sweep.
        signals: sent one after another.
        everyone: whether all processes get them, as from a terminal, or the parent alone.
        step_seconds: how long the third step and those after it take.
        starting: whether the signals come before any step, while workers start.
    """

    def __init__(
        self,
        out: Path,
        workers: int,
        signals: list[int],
        everyone: bool,
        step_seconds: float = 1,
        starting: bool = False,
    ) -> None:
        words = f"reproduce recall --preset smoke --workers {workers} --out".split()
        self.command = [sys.executable, str(SCRIPT), *words, str(out)]
        self.process = subprocess.Popen(
            self.command, env=environment(step_seconds), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        begun = set() if starting else {f"seed{i}" for i in range(workers)}
        try:
            wait_for(lambda: list(out.glob("runs/*/config.json")), "the first folder", self.process)
            wait_for(lambda: started(out) == begun, "the first steps", self.process)
            for number in signals:
                time.sleep(0.3)
                (os.killpg if everyone else os.kill)(self.process.pid, number)
            _, self.said = self.process.communicate(timeout=PATIENCE)
            wait_for(lambda: is_gone(self.process.pid), "the end of all processes")
        finally:
            if not is_gone(self.process.pid):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert "Traceback" not in self.said
        assert started(out) == begun, "a run that waited was started"
        assert not list(out.glob("runs/*/metrics.json"))

    @property
    def resumes_with(self) -> list[str]:
        return shlex.split(self.said.strip().splitlines()[-1])


def steps_saved(out: Path) -> dict[str, int]:
    """The step of the newest checkpoint of each run that has one."""
    found = {folder.name: checkpoint.complete_checkpoints(folder) for folder in out.glob("runs/*")}
    return {name: json.loads((paths[-1] / "place.json").read_text())["step"] for name, paths in found.items() if paths}


def test_one_interrupt_saves_every_run_and_stops_everything(tmp_path):
    """As a terminal does it: every process of the group gets the signal."""
    stopped = StoppedSweep(tmp_path / "out", workers=2, signals=[signal.SIGINT], everyone=True)
    assert stopped.process.returncode == 130
    assert steps_saved(tmp_path / "out").keys() == {"seed0", "seed1"}
    assert all(2 < step < SETTINGS.steps for step in steps_saved(tmp_path / "out").values())
    assert stopped.resumes_with == [*stopped.command[1:], "--resume"]
    assert sweep(runs(), tmp_path / "out" / "runs") == sweep(runs(), tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "signals", "everyone", "code"),
    [
        (2, [signal.SIGINT], False, 130),
        (1, [signal.SIGINT], False, 130),
        (2, [signal.SIGTERM, signal.SIGTERM], True, 143),
        (1, [signal.SIGTERM], False, 143),
    ],
)
def test_the_command_that_is_printed_ends_as_if_nothing_had_stopped_it(tmp_path, workers, signals, everyone, code):
    out = tmp_path / "out"
    stopped = StoppedSweep(out, workers, signals, everyone)
    assert stopped.process.returncode == code
    assert len(steps_saved(out)) == workers
    subprocess.run([sys.executable, *stopped.resumes_with], env=environment(0), check=True, timeout=PATIENCE)
    assert json.loads((out / "metrics.json").read_text())["metrics"] == sweep(runs(), tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "everyone"), [(1, False), (2, True)])
def test_a_second_interrupt_stops_at_once_without_saving(tmp_path, workers, everyone):
    """After the first, it waits for a step that takes longer than the test."""
    out = tmp_path / "out"
    stopped = StoppedSweep(out, workers, [signal.SIGINT] * 2, everyone, step_seconds=10 * PATIENCE)
    assert stopped.process.returncode == 130
    assert steps_saved(out) == {}
    assert stopped.resumes_with[-1] == "--resume"


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [True, False])
def test_an_interrupt_while_workers_start(tmp_path, everyone):
    stopped = StoppedSweep(tmp_path, 2, [signal.SIGINT], everyone, starting=True)
    assert stopped.process.returncode == 130
    assert stopped.resumes_with[-1] == "--resume"


def raises(error: BaseException):
    """Stands in for something that takes long, and is stopped."""

    def stopped(*_args, **_options):
        raise error

    return stopped


def said_by(result) -> str:
    """What is on standard error, without the empty line that bars leave where there is no terminal."""
    return result.stderr.removeprefix("\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(signal.SIGTERM)], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("words", "long"),
    [
        (["catalogue"], "membydesign.cli.catalogue.show_table"),
        (["bench", "--only", "speed"], "membydesign_bench.run.page.version_of"),
        (["report", "."], "membydesign.cli.report.record.read"),
        (["reproduce", "collision"], "membydesign.experiments.collision.run.run"),
    ],
)
def test_any_command_ends_with_one_line(words, long, error, monkeypatch, tmp_path):
    (tmp_path / "metrics.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(long, raises(error))
    result = CliRunner().invoke(app, words)
    code = 143 if isinstance(error, Stopped) else 130
    assert (result.exit_code, result.stdout, said_by(result)) == (code, "", "mbd: stopped\n")


@pytest.mark.parametrize(("given", "added"), [([], ["--resume"]), (["--resume"], [])])
def test_the_command_that_resumes_has_every_word(given, added, monkeypatch, tmp_path):
    words = ["reproduce", "recall", "--preset", "smoke", *given, "--out", str(tmp_path / "with space")]
    monkeypatch.setattr("membydesign.experiments.recall.run.run", raises(KeyboardInterrupt()))
    result = CliRunner().invoke(app, words, prog_name="mbd")
    assert result.exit_code == 130
    assert said_by(result) == f"mbd: stopped; to resume:\n  mbd {shlex.join([*words, *added])}\n"


def test_launched_processes_say_it_once(monkeypatch, tmp_path):
    words = ["reproduce", "recall", "--preset", "smoke", "--out", str(tmp_path)]
    monkeypatch.setattr("membydesign.experiments.recall.run.run", raises(KeyboardInterrupt()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = [said_by(CliRunner().invoke(app, words, env={"RANK": rank})) for rank in "01"]
    assert said == ["mbd: stopped; to resume, rerun the same `accelerate launch` command with --resume\n", ""]


def test_stopped_while_packages_load(monkeypatch, capsys):
    def stopped():
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("membydesign.cli._run", stopped)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 143
    assert capsys.readouterr().err == "mbd: stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before
