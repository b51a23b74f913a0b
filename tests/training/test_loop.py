"""The loop against one written out here, resumption to the same bits, and what happens when things go wrong."""

import json
from dataclasses import replace

import pytest
import torch

from membydesign.training import CheckpointError, Diverged, checkpoint, train, train_in_stages
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
    assert [path.name for path in checkpoint.found(tmp_path / "broken")] == ["step-00000021"]
    broken = model()
    train(broken, batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path / "broken")
    assert all(torch.equal(p, weights(broken)[name]) for name, p in weights(whole).items())
    logs = [
        [json.loads(line)["loss"] for line in (tmp_path / folder / "log.jsonl").read_text().splitlines()]
        for folder in ("whole", "broken")
    ]
    assert len(logs[0]) == len(logs[1])
    assert logs[0][:5] + logs[0][6:] == logs[1][:5] + logs[1][6:]  # the stretch of the break is logged from its middle


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
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-00000028"]


def test_a_corrupted_checkpoint_is_named(tmp_path):
    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path, until=14)
    path = tmp_path / "step-00000014" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-00000014: expected a complete checkpoint.*remove this folder"):
        train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)


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
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000040"]


def test_a_full_disk_at_a_checkpoint_keeps_the_last_one(tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path, until=14)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path)
    monkeypatch.undo()
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-00000014"]
    assert train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=tmp_path).step == 40


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
