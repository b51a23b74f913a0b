"""The lock of a run folder: one process at a time, and free as soon as its process has ended, however it ended."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from membydesign.cli.app import app
from membydesign.training import FolderInUse, lock, train
from membydesign.training.lock import LOCK, locked
from training.problem import SETTINGS, batch_of, losses_of, model

HOLDS = """
import os, sys, time
from pathlib import Path
from membydesign.training import lock
if sys.argv[2] == "by name":
    def refuse(_descriptor):
        raise OSError(38, "Function not implemented")
    lock._lock = refuse
with lock.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def by_name(monkeypatch):
    """As on a file system without locks."""

    def refuse(_descriptor):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock, "_lock", refuse)


@pytest.fixture(params=["by the system", pytest.param("by name", marks=pytest.mark.slow)])
def kind(request, monkeypatch):
    if request.param == "by name":
        by_name(monkeypatch)
    return request.param


@pytest.fixture
def holder(tmp_path, kind):
    """Another process that holds the lock of `tmp_path`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDS, str(tmp_path), kind]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_is_refused_and_the_holder_named(tmp_path, holder):
    message = rf"expected a folder that no other process uses, and process {holder.pid} on .* writes to it; wait until"
    with pytest.raises(FolderInUse, match=message), locked(tmp_path):
        pass
    with pytest.raises(FolderInUse, match=f"process {holder.pid} on"):
        train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("kind", ["by the system"], indirect=True)
def test_the_command_stops_at_a_folder_in_use(tmp_path, holder):
    command = ["reproduce", "recall", "--preset", "smoke", "--out", str(tmp_path), "--resume"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"process {holder.pid} on" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_the_lock_of_a_killed_process_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    with locked(tmp_path, patience=30):  # also while it is a zombie
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    holder.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_same_thread_may_take_it_again_and_another_may_not(tmp_path, kind):
    refused = []

    def other():
        try:
            with locked(tmp_path):
                pass
        except FolderInUse as error:
            refused.append(str(error))

    def in_a_thread():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with locked(tmp_path):
        with locked(tmp_path / "." / ""):
            in_a_thread()
        in_a_thread()
        assert (tmp_path / LOCK).exists()
    in_a_thread()
    assert len(refused) == 2
    assert f"process {os.getpid()} on" in refused[0]


def test_a_lock_is_waited_for(tmp_path, kind):
    taken = threading.Event()

    def briefly():
        with locked(tmp_path):
            taken.set()
            time.sleep(0.2)

    thread = threading.Thread(target=briefly)
    thread.start()
    taken.wait()
    with locked(tmp_path, patience=30):
        assert (tmp_path / LOCK).exists()
    thread.join()


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"pid": "x"}'])
def test_a_file_that_an_ended_process_left_is_no_lock(tmp_path, kind, text):
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_reused_process_number_is_no_lock(tmp_path, monkeypatch):
    """The file names a process that ended; its number now belongs to this one."""
    by_name(monkeypatch)
    about = {**json.loads(lock._about_us()), "ticks": 1}
    (tmp_path / LOCK).write_text(json.dumps(about))
    if lock._ticks(os.getpid()) is None:
        pytest.skip("the system does not say when a process started")
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text()) != about


def test_a_process_on_another_computer_counts_as_running_without_locks(tmp_path, monkeypatch):
    by_name(monkeypatch)
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "then", "ticks": 1}))
    message = r"process 1 on elsewhere \(since then\) .*; if that process has ended, remove .*\.lock$"
    with pytest.raises(FolderInUse, match=message), locked(tmp_path):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    """As the workers of a data loader, which may outlive a killed training."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom membydesign.training.lock import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    if os.fork() == 0:\n        print('forked', os.getpid(), flush=True)\n        time.sleep(600)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    try:
        with locked(tmp_path):
            assert (tmp_path / LOCK).exists()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = "expected a folder that can be written, got: (File exists|Not a directory)"
    with pytest.raises(FolderInUse, match=message), locked(tmp_path / "file"):
        pass
