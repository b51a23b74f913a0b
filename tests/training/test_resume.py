"""A resumed run is the run that was started: the same settings and data, from the last checkpoint that is intact."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from membydesign.training import (
    CheckpointError,
    SweepError,
    checkpoint,
    make_accelerator,
    sweep,
    train,
    train_in_stages,
)
from training.problem import SETTINGS, batch_of, losses_of, model, runs

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]), "OMP_NUM_THREADS": "1"}


def go(folder, settings=SETTINGS, batches=batch_of, seed=0, **more):
    small = model(dropout=0.2)
    train(small, batches, losses_of, settings, seed=seed, directory=folder, **more)
    return {name: p.detach().clone() for name, p in small.named_parameters()}


def log_of(folder):
    """All lines of the log, without the times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_same_end(folder, whole):
    """The last checkpoint, bit for bit, and the log are those of an uninterrupted run."""
    ours, theirs = (checkpoint.complete_checkpoints(each)[-1] for each in (folder, whole))
    assert ours.name == theirs.name
    for file in ("weights.safetensors", "optimiser.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    assert log_of(folder) == log_of(whole)


CHANGED = {
    "learning_rate": (replace(SETTINGS, learning_rate=0.02), "learning_rate: stored 0.01, requested 0.02"),
    "steps": (replace(SETTINGS, steps=80), "steps: stored 40, requested 80"),
    "clip": (replace(SETTINGS, clip=None), "clip: stored 0.5, requested None"),
    "betas": (replace(SETTINGS, betas=(0.9, 0.95)), r"betas: stored \[0.9, 0.999\], requested \[0.9, 0.95\]"),
    "several": (
        replace(SETTINGS, eps=1e-6, warmup=3, weight_decay=0.0, decayed="all", batch_size=4),
        "batch_size: stored 8, requested 4; decayed: .*; and 1 more",
    ),
}


@pytest.mark.parametrize("changed", CHANGED)
def test_other_settings_are_refused_with_both_values(tmp_path, changed):
    settings, message = CHANGED[changed]
    go(tmp_path, until=7)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=f"expected the settings that this run was started.*{message}.*; resume with"
    ):
        go(tmp_path, settings)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_arguments_are_refused_too(tmp_path):
    go(tmp_path, until=7)
    changed: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed: stored 0, requested 1"),
        ({"multipliers": {"head.weight": 0.1}}, "multipliers.head.weight: stored 'nothing', requested 0.1"),
        ({"clip_groups": lambda name: name[:4]}, "clip_groups.embedding.bias: stored 'nothing', requested 'embe'"),
    ]
    for more, message in changed:
        with pytest.raises(CheckpointError, match=message):
            go(tmp_path, **more)
    with pytest.raises(CheckpointError, match="precision: stored 'no', requested 'bf16'"):
        go(tmp_path, accelerator=make_accelerator("bf16"))
    frozen = model(dropout=0.2)
    frozen.norm.requires_grad_(False)
    with pytest.raises(CheckpointError, match="trained_parameters: stored 195, requested 163"):
        train(frozen, batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)


def test_intervals_may_change(tmp_path):
    whole = go(tmp_path / "whole")
    go(tmp_path / "parts", until=7)
    ended = go(tmp_path / "parts", replace(SETTINGS, log_every=3, save_every=11))
    assert all(torch.equal(p, ended[name]) for name, p in whole.items())


def test_a_run_with_a_constant_rate_may_become_longer_and_not_shorter(tmp_path):
    constant = replace(SETTINGS, final_fraction=1.0)
    whole = go(tmp_path / "whole", constant)
    go(tmp_path / "parts", replace(constant, steps=20))
    ended = go(tmp_path / "parts", constant)
    assert all(torch.equal(p, ended[name]) for name, p in whole.items())
    with pytest.raises(CheckpointError, match="steps: expected at least 40, which this run has done, got 20; choose"):
        go(tmp_path / "parts", replace(constant, steps=20))


def test_other_data_are_refused(tmp_path):
    go(tmp_path, until=14)
    message = "batch_of: expected the data that this run was started with, got another batch at step {}; resume with"
    with pytest.raises(CheckpointError, match=message.format(0)):
        go(tmp_path, batches=lambda step: batch_of(step + 1))
    with pytest.raises(CheckpointError, match=message.format(13)):
        go(tmp_path, batches=lambda step: batch_of(step if step < 5 else step + 1))
    assert go(tmp_path)


DAMAGE = {
    "truncated": lambda x: x[:50],
    "empty": lambda _: b"",
    "a bit": lambda x: x[:-9] + bytes([x[-9] ^ 1]) + x[-8:],
    "zeros": lambda x: bytes(len(x)),
}


@pytest.mark.parametrize("file", ["weights.safetensors", "optimiser.safetensors", "place.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, file, damage):
    go(tmp_path / "whole", replace(SETTINGS, steps=20, warmup=0))
    settings = replace(SETTINGS, steps=20, warmup=0)
    go(tmp_path / "run", settings, until=14)
    (tmp_path / "whole" / "log.jsonl").unlink()  # `until` adds a line to the log
    path = tmp_path / "run" / "step-00000014" / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.warns(
        UserWarning, match=r"step-00000014: the checkpoint is damaged \(.*\); resuming from step-00000007"
    ):
        ended = go(tmp_path / "run", settings)
    stored = checkpoint.read(tmp_path / "whole")
    assert stored is not None
    assert all(torch.equal(p, ended[name]) for name, p in stored.weights.items())
    assert [path.name for path in sorted((tmp_path / "run").glob("step-*"))] == ["step-00000014", "step-00000020"]
    assert [line["step"] for line in log_of(tmp_path / "run")] == [4, 8, 12, 16, 20]


def test_any_flipped_bit_of_the_position_is_noticed(tmp_path):
    go(tmp_path, until=7)
    path = tmp_path / "step-00000007" / "place.json"
    written = path.read_bytes()
    for i in range(0, len(written), 7):
        flipped = written[:i] + bytes([written[i] ^ 1]) + written[i + 1 :]
        path.write_bytes(flipped)
        try:
            same = json.loads(flipped) == json.loads(written)  # a bit of white space
        except ValueError:
            same = False
        if not same:
            with pytest.raises(CheckpointError, match="step-00000007: expected a complete checkpoint"):
                checkpoint.read(tmp_path)


NONSENSE = [
    "",
    "[]",
    "3",
    "null",
    "{}",
    '{"step": 7}',
    '{"step": 7, "sha256": []}',
    "[" * 100_000,
    "\x00",
    '{"step": NaN',
]


@pytest.mark.parametrize("text", NONSENSE, ids=[text[:24] or "empty" for text in NONSENSE])
def test_a_position_that_is_nonsense_is_named(tmp_path, text):
    go(tmp_path, until=7)
    (tmp_path / "step-00000007" / "place.json").write_text(text)
    with pytest.raises(
        CheckpointError, match="no checkpoint of this run is intact .*step-00000007: .*; remove the folders"
    ):
        go(tmp_path)


def test_values_of_a_position_are_checked(tmp_path):
    """Also of one without a digest, as version 0.1.0 wrote it, which is otherwise read."""
    go(tmp_path, until=7)
    path = tmp_path / "step-00000007" / "place.json"
    place = json.loads(path.read_text())
    for name in ("settings", "data"):
        del place[name]
    del place["sha256"]["place.json"]
    for name, value in (
        ("step", 8),
        ("step", "7"),
        ("loss", "x"),
        ("seconds", None),
        ("counted", 1.5),
        ("total", True),
    ):
        path.write_text(json.dumps({**place, name: value}))
        with pytest.raises(CheckpointError, match=rf"place\.json: {name}: expected"):
            go(tmp_path)
    path.write_text(json.dumps(place))
    assert go(tmp_path)


def test_a_missing_file_falls_back_and_a_forbidden_one_does_not(tmp_path, monkeypatch):
    """A disk that cannot be reached must not cost the newest checkpoint."""
    go(tmp_path, until=14)

    def forbidden(_path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_digest", forbidden)
        with pytest.raises(
            CheckpointError, match="step-00000014: expected a checkpoint that can be read, got: .*denied"
        ):
            go(tmp_path)
    (tmp_path / "step-00000014" / "weights.safetensors").unlink()
    with pytest.warns(UserWarning, match="resuming from step-00000007"):
        go(tmp_path)


@pytest.mark.parametrize("fails_at", ["weights", "optimiser", "place", "rename", "log"])
def test_a_full_disk_at_any_file_of_a_checkpoint_loses_nothing(tmp_path, monkeypatch, fails_at):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    def half(what):
        real = checkpoint.save_file

        def write(tensors, path):
            if what in path.name:
                path.write_bytes(b"half of it")
                full()
            real(tensors, path)

        return write

    settings = replace(SETTINGS, log_every=7, save_every=7)
    go(tmp_path / "whole", settings)
    go(tmp_path / "run", settings, until=14)
    with monkeypatch.context() as patch:
        if fails_at == "log":
            patch.setattr("membydesign.training.log.os.fsync", full)
        elif fails_at == "place":
            patch.setattr(checkpoint, "write_text", full)
        elif fails_at == "rename":
            patch.setattr("membydesign.training.checkpoint.os.replace", full)
        else:
            patch.setattr(checkpoint, "save_file", half(fails_at))
        with pytest.raises(
            CheckpointError, match="No space left on device.*intact; fix this and rerun the same command"
        ):
            go(tmp_path / "run", settings)
    assert [path.name for path in sorted((tmp_path / "run").glob("step-*"))] == ["step-00000007", "step-00000014"]
    go(tmp_path / "run", settings)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_measurements_that_are_nonsense_are_named(tmp_path):
    (tmp_path / "measured.json").write_text("[1]")
    with pytest.raises(
        CheckpointError, match=r"measured\.json: expected a JSON object, got list; remove .* to restart the run"
    ):
        train_in_stages(
            model(), batch_of, losses_of, SETTINGS, milestones=(), measure=lambda _: 0, seed=0, directory=tmp_path
        )


def test_settings_of_a_sweep_that_are_nonsense_are_named(tmp_path):
    sweep(runs(5, 1), tmp_path)
    for text, message in (
        ("{", "config.json: expected JSON, got .*; remove"),
        ("[]", "expected a JSON object, got"),
    ):
        (tmp_path / "seed0" / "config.json").write_text(text)
        with pytest.raises(SweepError, match=message):
            sweep(runs(5, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_twenty_random_moments_a_run_ends_with_the_same_weights_and_log(tmp_path):
    command = [sys.executable, str(HERE / "killed.py"), str(tmp_path), "20", "0"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20\n"
    finished = [path for path in tmp_path.iterdir() if path.name != "whole"]
    assert finished
    for folder in finished:
        assert_same_end(folder, tmp_path / "whole")
        assert not list(folder.glob("*.partial")) + list(folder.glob(".lock"))


@pytest.mark.slow
def test_two_starts_on_one_folder_one_trains_and_the_other_stops(tmp_path):
    """The folder of a sweep, and of `train` by itself."""
    alone = sweep(runs(300), tmp_path / "alone")
    command = [sys.executable, str(HERE / "problem.py"), str(tmp_path / "both"), "300", "2"]
    deadline = time.monotonic() + 300
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as first:
        while not list((tmp_path / "both").glob("*/step-*/place.json")):
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert first.poll() is None, "the sweep ended too early"
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # so that it is not done before the second has started
        second = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=300) == 0
    assert second.returncode != 0
    assert f"FolderInUse: {tmp_path / 'both'}: expected a folder that no other process uses" in second.stderr
    assert f"process {first.pid} on" in second.stderr
    assert sweep(runs(300), tmp_path / "both") == alone
