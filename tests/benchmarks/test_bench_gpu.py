"""`mbd bench --device cuda`, as far as that goes without a GPU."""

from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from fla_stand_ins import STAND_INS
from membydesign.cli.app import app
from membydesign.testing import assert_close
from membydesign_bench import memory, timing, works
from membydesign_bench.problem import Problem, Size
from membydesign_bench.sections import SECTIONS, chosen


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "140", "TERM": "xterm"})
    assert result.exit_code == 2, result.output
    return result.stderr


def outputs_and_gradients(work: works.Work, size: Size) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {name: x.detach().requires_grad_() for name, x in work.inputs(Problem(size)).items()}
    output = work.sequence(**leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return output.detach(), dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), weights), strict=True))


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = refused("--device", "cuda")
    assert "--device: expected cpu, since torch finds no GPU here" in found
    assert "--device: expected cpu or cuda, got 'tpu'" in refused("--device", "tpu")


def test_sections_of_a_gpu(monkeypatch):
    assert chosen([], "cuda") == ["speed", "transitions", "growth", "memory"]
    assert chosen([], "cpu") == list(SECTIONS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    message = "--only: expected some of speed, transitions, growth, memory with --device cuda, got 'text'"
    assert message in refused("--device", "cuda", "--only", "text")


@pytest.mark.parametrize("rule", works.GPU_PEERS)
def test_ours_equals_flash_linear_attention(monkeypatch, rule):
    """Its functions by stand-ins that loop over tokens: both sides are given the same numbers."""
    monkeypatch.setattr(works.fla, "operation", STAND_INS.get)
    size = Size(2, 3, 20, 8)
    their_work = works.peers("cuda")[rule]()
    assert their_work is not None
    assert their_work.title.startswith("fla's ")
    theirs, their_gradients = outputs_and_gradients(their_work, size)
    ours, our_gradients = outputs_and_gradients(works.OURS[rule], size)
    assert_close(ours, theirs, 2e-5)
    for name in ("q", "v", "x", "dt"):
        if name in our_gradients:
            assert_close(our_gradients[name], their_gradients[name], 5e-5)


def test_decoding_beside_flash_linear_attention(monkeypatch):
    stand_ins = {**STAND_INS, "fused_recurrent_gated_delta_rule": STAND_INS["chunk_gated_delta_rule"]}
    monkeypatch.setattr(works.fla, "operation", stand_ins.get)
    problem = Problem(Size(3, 2, 1, 16))
    their_work, step = works.peers("cuda")["gated_deltanet"](), works.OURS["gated_deltanet"].step
    assert their_work is not None
    assert their_work.step is not None
    assert step is not None
    assert_close(step(problem)(), their_work.step(problem)(), 1e-5)


def test_without_flash_linear_attention_there_is_no_peer(monkeypatch):
    monkeypatch.setattr(works.fla, "operation", lambda name: None)
    assert [peer() for peer in works.peers("cuda").values()] == [None] * 3
    assert works.peers("cpu") is works.PEERS


class Event:
    """A clock's event that keeps the order of calls."""

    order: ClassVar[list[str]] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.order.append("record")

    def elapsed_time(self, other):
        return 12.0


def test_the_clock_of_a_gpu_waits_for_the_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: Event.order.append("wait"))
    Event.order.clear()
    assert timing.CLOCKS["cuda"](lambda: Event.order.append("work"), 3) == 4.0
    assert Event.order == ["wait", "record", "work", "work", "work", "record", "wait"]
    assert set(timing.interleaved({"a": lambda: None}, 1, "cuda")) == {"a"}


def test_peak_memory_of_a_gpu(monkeypatch):
    level = iter([100 * 2**20])
    for name, value in {
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: next(level),
        "max_memory_allocated": lambda: 130 * 2**20,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert memory.rise(lambda: None, "cuda") == 30.0


def test_problems_of_a_gpu_are_in_half_precision():
    """As models are trained there; "meta" stands for any device that is not the CPU."""
    problem = Problem(Size(1, 2, 3, 4), "meta")
    assert {x.dtype for x in (problem.q, problem.k, problem.v)} == {torch.bfloat16}
    others = (problem.log_decay, problem.write_noise, problem.memory, problem.gate(), problem.log_decay_of_rows(4))
    assert {x.dtype for x in others} == {torch.float32}
    assert all(x.is_meta for x in others)
