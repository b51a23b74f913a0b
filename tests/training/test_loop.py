"""The loop against one written out here, resumption to the same bits, and what happens when things go wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from membydesign.models import MemoryForCausalLM
from membydesign.training import (
    CheckpointError,
    Diverged,
    checkpoint,
    make_accelerator,
    save_model,
    train,
    train_in_stages,
)
from training import language
from training.problem import SETTINGS, batch_of, losses_of, model


def weights(m):
    return {name: p.detach().clone() for name, p in m.named_parameters()}


def test_it_is_adamw_with_clipping_and_the_schedule():
    ours, theirs = model(), model()
    train(ours, batch_of, losses_of, SETTINGS, seed=0)
    norms_and_biases = [p for p in theirs.parameters() if p.ndim == 1]
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms_and_biases, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1.0)
    for step in range(40):
        for group in optimiser.param_groups:
            group["lr"] = SETTINGS.rate(step)
        optimiser.zero_grad()
        losses_of(theirs, batch_of(step)).mean().backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimiser.step()
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(weights(ours)[name], p, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 8, 20])
def test_gradients_are_accumulated_over_parts_of_a_batch(rows):
    """Also if parts have different numbers of targets: here rows are left out by what is in them."""

    def some(m, batch):
        losses = nn.functional.cross_entropy(m(batch["x"]).transpose(1, 2), batch["y"], reduction="none")
        return losses[batch["y"] > 0]

    at_once, in_parts = model(), model()
    seen = [[], []]
    train(at_once, batch_of, some, SETTINGS, seed=0, watch=lambda p: seen[0].append(p.loss))
    train(in_parts, batch_of, some, SETTINGS, seed=0, rows_at_a_time=rows, watch=lambda p: seen[1].append(p.loss))
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    for name, p in weights(at_once).items():
        torch.testing.assert_close(weights(in_parts)[name], p, rtol=1e-4, atol=1e-6)


def test_learning_rates_have_multipliers_by_name():
    """With a tenth of the rate, Adam's first step is a tenth as long."""
    start, plain, slowed = model(), model(), model()
    one = replace(SETTINGS, weight_decay=0.0)
    train(plain, batch_of, losses_of, one, seed=0, until=1)
    train(slowed, batch_of, losses_of, one, seed=0, until=1, multipliers={"head.weight": 0.1, "norm.bias": 0.0})
    moved = {n: (weights(slowed)[n] - p, weights(plain)[n] - p) for n, p in weights(start).items()}
    torch.testing.assert_close(moved["head.weight"][0], 0.1 * moved["head.weight"][1], rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(moved["embedding.weight"][0], moved["embedding.weight"][1])
    assert not moved["norm.bias"][0].any()
    with pytest.raises(ValueError, match=r"multipliers: expected names of trained parameters, got head\.wieght"):
        train(model(), batch_of, losses_of, one, seed=0, multipliers={"head.wieght": 0.1})


@pytest.mark.slow
def test_mixed_precision_computes_in_bf16_and_keeps_float32():
    """In a process of its own: Accelerate has one precision for each."""
    code = (
        "from membydesign.training import make_accelerator, train\n"
        "from training.problem import SETTINGS, batch_of, losses_of, model\n"
        "m, made = model(), []\n"
        "m.head.register_forward_hook(lambda _m, _x, y: made.append(y.dtype))\n"
        "done = train(m, batch_of, losses_of, SETTINGS, seed=0, accelerator=make_accelerator('bf16'))\n"
        "print(*set(made), *{p.dtype for p in m.parameters()}, done.loss)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    inside, kept, loss = run.stdout.split()
    assert (inside, kept) == ("torch.bfloat16", "torch.float32")
    assert float(loss) == pytest.approx(train(model(), batch_of, losses_of, SETTINGS, seed=0).loss, rel=0.05)
    with pytest.raises(ValueError, match="precision: expected 'fp32' or 'bf16', got 'fp16'"):
        make_accelerator("fp16")  # pyright: ignore[reportArgumentType]


def test_a_process_may_change_its_precision():
    assert [make_accelerator(p).mixed_precision for p in ("bf16", "fp32", "bf16", "fp32")] == ["bf16", "no"] * 2
    with pytest.raises(ValueError, match="precision: expected 'fp32' or 'bf16', got 'fp8'"):
        make_accelerator("fp8")  # pyright: ignore[reportArgumentType]


def test_the_loss_goes_down():
    done = train(model(), batch_of, losses_of, replace(SETTINGS, steps=200), seed=0)
    assert done.step == 200
    assert done.loss < 0.5 * losses_of(model(), batch_of(0)).mean()


@pytest.mark.parametrize("stops", [(1,), (7,), (20, 33), (39,)])
def test_a_run_in_sessions_ends_with_the_same_bits(tmp_path, stops):
    whole = model(dropout=0.2)
    train(whole, batch_of, losses_of, SETTINGS, seed=3, directory=tmp_path / "whole")
    again = model()
    for stop in (*stops, None):
        again = model(dropout=0.2)  # a fresh process would build it anew
        train(again, batch_of, losses_of, SETTINGS, seed=3, directory=tmp_path / "parts", until=stop)
    for name, p in weights(whole).items():
        assert torch.equal(p, weights(again)[name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted({*range(4, 41, 4), *stops})


def test_a_run_that_broke_between_checkpoints_loses_only_what_came_after(tmp_path):
    def breaks(step):
        if step == 25:
            raise KeyboardInterrupt
        return batch_of(step)

    whole, broken = model(), model()
    train(whole, batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(broken, breaks, losses_of, SETTINGS, seed=0, directory=tmp_path / "broken")
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path / "broken")] == [
        "step-00000014",
        "step-00000021",
    ]
    broken = model()
    train(broken, batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path / "broken")
    assert all(torch.equal(p, weights(broken)[name]) for name, p in weights(whole).items())
    logs = [
        [json.loads(line)["loss"] for line in (tmp_path / folder / "log.jsonl").read_text().splitlines()]
        for folder in ("whole", "broken")
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("broken_at", [25, 37, 39])
def test_the_loss_of_a_run_that_broke_is_that_of_one_that_did_not(tmp_path, broken_at):
    """Checkpoints every 7 steps, lines of the log every 4: a stretch of the log may begin before a checkpoint."""

    def breaks(step):
        if step == broken_at:
            raise KeyboardInterrupt
        return batch_of(step)

    settings = replace(SETTINGS, steps=39) if broken_at < 39 else SETTINGS
    whole = train(model(), batch_of, losses_of, settings, seed=0)
    with pytest.raises(KeyboardInterrupt):
        train(model(), breaks, losses_of, settings, seed=0, directory=tmp_path)
    assert train(model(), batch_of, losses_of, settings, seed=0, directory=tmp_path).loss == whole.loss


def test_dropout_depends_on_the_seed():
    ends = []
    for seed in (0, 0, 1):
        m = model(dropout=0.5)
        train(m, batch_of, losses_of, SETTINGS, seed=seed)
        ends.append(weights(m)["head.weight"])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    def poisoned(step):
        batch = batch_of(step)
        return {**batch, "x": batch["x"] * float("nan")} if step == 30 else batch

    with pytest.raises(Diverged, match="step 30: expected a finite loss, got nan; try a lower learning rate"):
        train(model(), poisoned, losses_of, SETTINGS, seed=0, directory=tmp_path)
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path)] == ["step-00000021", "step-00000028"]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(clip):
    """The loss is finite: a square root at zero."""
    small = model()

    def losses(m, batch):
        return losses_of(m, batch) + (0 * m.head.weight.sum()).sqrt()

    before = weights(small)
    with pytest.raises(Diverged, match="step 0: expected a finite norm of the gradient, got nan"):
        train(small, batch_of, losses, replace(SETTINGS, clip=clip), seed=0)
    assert all(torch.equal(p, before[name]) for name, p in weights(small).items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path, until=7)
    other = torch.nn.Sequential(torch.nn.Linear(6, 3))
    with pytest.raises(CheckpointError, match=r"expected the weights of this model.*0\.bias"):
        train(other, batch_of, lambda m, b: m(b["x"]).flatten(), SETTINGS, seed=0, directory=tmp_path)


def test_a_checkpoint_that_was_not_finished_is_not_used(tmp_path):
    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path, until=14)
    (tmp_path / "step-00000021.partial").mkdir()
    done = train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)
    assert done.step == 40
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000035", "step-00000040"]


def test_a_full_disk_at_a_checkpoint_keeps_the_last_one(tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path, until=14)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device.*step-00000014 is intact; fix this and rerun"):
        train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)
    monkeypatch.undo()
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000007", "step-00000014"]
    assert train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path).step == 40


def test_a_full_disk_at_the_model_keeps_the_one_that_was_there(tmp_path, monkeypatch):
    def full(_self, folder, **_options):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device")

    language_model = language.model()
    save_model(language_model, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    monkeypatch.setattr(MemoryForCausalLM, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="the model could not be written .*No space left.*the same command"):
        save_model(language_model, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_a_garbled_log_does_not_stop_a_run(tmp_path):
    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path, until=14)
    log = tmp_path / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, '{"step": \x00\x00']) + "\n")
    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)
    found = log.read_text().splitlines()
    assert found[: len(lines)] == lines
    assert json.loads(found[-1])["step"] == 40


def test_milestones_are_measured_once_and_on_the_model_of_their_step(tmp_path):
    def staged(m, batches, calls):
        def measure(step):
            calls.append(step)
            return {"step": step, "weight": m.head.weight.double().sum().item()}

        return train_in_stages(
            m, batches, losses_of, SETTINGS, milestones=(5, 20), measure=measure, seed=0, directory=tmp_path / "parts"
        )

    def breaks(step):
        if step == 30:
            raise KeyboardInterrupt
        return batch_of(step)

    calls = []
    with pytest.raises(KeyboardInterrupt):
        staged(model(), breaks, calls)
    trained, measured = staged(model(), batch_of, calls)
    assert calls == [5, 20, 40]
    assert trained.step == 40
    for step in (5, 20, 40):
        alone = model()
        train(alone, batch_of, losses_of, SETTINGS, seed=0, until=step)
        assert measured[str(step)] == {"step": step, "weight": alone.head.weight.double().sum().item()}
    again = staged(model(), batch_of, calls)
    assert again[1] == measured
    assert calls == [5, 20, 40]
