"""The section `designs` of the benchmark: each design with a kernel, next to the one that it extends."""

import pytest
import torch

from membydesign import catalogue
from membydesign_bench.designs import compared, designs, rows, work
from membydesign_bench.problem import Problem, Size
from membydesign_bench.timing import Settings
from membydesign_bench.works import TRAINING, prepare

SIZE = Size(1, 2, 20, 32)
COMPARED = compared(SIZE.D)


def test_designs_are_compared_with_what_they_extend():
    assert COMPARED["stationary_bayesian_layer"] == COMPARED["low_rank"] == "bayesian_layer"
    assert COMPARED["count_memory"] == COMPARED["gla"] == "linear_attention"
    assert "bayesian_layer" not in COMPARED
    assert "mesa_net" not in COMPARED, "it runs in the loop alone, which would take minutes"
    assert set(COMPARED) <= set(rows())
    assert set(catalogue) < set(rows())


@pytest.mark.parametrize("name", COMPARED)
def test_every_design_runs_forward_and_backward(name):
    for task in TRAINING:
        results = prepare(work(name), task, SIZE)()
        tensors = [results] if isinstance(results, torch.Tensor) else list(results)  # pyright: ignore
        assert all(x.isfinite().all() for x in tensors)


def test_inputs_of_the_same_name_are_the_same_numbers():
    ours, theirs = (work(name).inputs(Problem(SIZE)) for name in ("stationary_bayesian_layer", "bayesian_layer"))
    for name in ("q", "k", "v", "log_decay", "write_noise"):
        assert torch.equal(ours[name], theirs[name])


def test_a_row_for_every_design_task_and_size():
    settings = Settings(sizes=(SIZE,), rounds=1)
    titles = [job.title for job in designs(settings)]
    assert len(titles) == len(TRAINING) * len(COMPARED)
    [row] = next(designs(settings)).run()
    assert (row.section, row.unit, row.size) == ("designs", "ms", str(SIZE))
    assert row.ratio is not None
    assert row.ratio > 0
