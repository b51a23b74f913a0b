"""Two processes under `accelerate launch`, replicated or sharded, take the steps of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from membydesign.models import MemoryForCausalLM
from membydesign.training import make_accelerator, train
from membydesign.training.distributed import WAIT
from training.language import SETTINGS, batch_of, losses_of, model
from training.launched import MILESTONES, plain, stages

SCRIPT = Path(__file__).with_name("launched.py")

WAYS = {
    "ddp": ("--multi_gpu", {}),
    "fsdp": ("--use_fsdp --fsdp_version 2", {}),
    "fsdp by Accelerate": ("--use_fsdp --fsdp_version 2", {"SHARD_BY_ACCELERATE": "1"}),
}
"""Accelerate's words; "multi_gpu" means torchrun, and without a GPU the processes talk by gloo. The last way is that of
GPUs, by force."""


def launch(way: str, what: str, file: Path, folder: Path, precision: str = "fp32") -> int:
    """The exit code of two processes that run `launched.py`."""
    words, more = WAYS[way]
    options = f"{words} --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "PRECISION": precision,
        **more,
    }
    return subprocess.run([*command, SCRIPT, what, file, folder], env=environment, check=False, timeout=900).returncode


def losses_in(folder: Path) -> list[float]:
    """Those of each step, from the log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, SETTINGS.steps + 1)]
    return [line["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_give_the_losses_of_one_and_one_goes_on_where_they_stopped(way, tmp_path):
    alone = plain(tmp_path / "alone", make_accelerator())[1]["losses"]
    assert launch(way, "plain", tmp_path / "found.json", tmp_path / "two" / "run") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["processes"], found["sharded"]) == (2, way != "ddp")
    assert found["patience"] == WAIT.total_seconds() >= 6 * 3600  # packing text takes hours
    assert len(alone) == len(found["losses"]) == 20
    assert found["losses"] == pytest.approx(alone, abs=1e-4)
    went_on, at_10 = [], tmp_path / "two" / "at-10"

    def watch(now):
        went_on.append(now.loss)

    train(model(), batch_of, losses_of, SETTINGS, seed=0, directory=at_10, watch=watch)
    assert len(went_on) == 10
    assert found["losses"][:10] + went_on == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_half_precision_is_for_the_maps_only_also_in_shards(way, tmp_path):
    assert launch(way, "bf16", tmp_path / "found.json", tmp_path / "run", "bf16") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["processes"], found["sharded"]) == (2, way != "ddp")
    assert (found["maps"], found["filters"], found["losses"]) == ("torch.bfloat16", "torch.float32", "torch.float32")
    assert found["weights"] == ["torch.float32"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "saved"), [("killed", 10), ("stopped", 12)])
@pytest.mark.parametrize("way", WAYS)
def test_stages_of_two_processes_are_those_of_one_also_if_one_was_killed(way, how, saved, tmp_path):
    """One that is stopped, by SIGTERM, takes the other with it, after both have saved the step."""
    trained, alone = stages(tmp_path / "alone" / "run", make_accelerator())
    assert [*alone["measured"]] == [*map(str, (*MILESTONES, 20))]

    two = tmp_path / "two" / "run"
    assert launch(way, how, tmp_path / "found.json", two) != 0
    assert not (tmp_path / "found.json").exists()
    assert [path.name for path in sorted(two.glob("step-*"))][-1] == f"step-{saved:08d}"
    assert launch(way, "stages", tmp_path / "found.json", two) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["processes"], found["sharded"]) == (2, way != "ddp")
    assert losses_in(two) == pytest.approx(losses_in(tmp_path / "alone" / "run"), abs=1e-4)
    for step, measured in alone["measured"].items():
        assert found["measured"][step] == pytest.approx(measured, abs=1e-4)
    saved = MemoryForCausalLM.from_pretrained(tmp_path / "two" / "model")
    assert saved.lm_head.weight is saved.model.embeddings.weight
    for (name, ours), theirs in zip(trained.language_model.named_parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-3, msg=name)
