"""The estimate for GPUs: its operations are those that torch counts, and its page has its numbers."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from membydesign_bench import roofline, works
from membydesign_bench.problem import Problem, Size
from membydesign_bench.rate import chunk_operations

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "roofline.md"


def counted(work: works.Work, size: Size, *, backward: bool) -> float:
    """Operations of all products that torch sees, for one token of one head."""
    leaves = {name: x.requires_grad_(backward) for name, x in work.inputs(Problem(size)).items()}
    with FlopCounterMode(display=False) as counter:
        output = work.sequence(**leaves)
        if backward:
            output.sum().backward()
    return counter.get_total_flops() / (size.B * size.H * size.T)


def test_operations_of_the_delta_rule():
    """With few tokens in a chunk, triangles that torch computes in full hardly count."""
    size, C = Size(1, 2, 32, 128), 4
    design = works.OURS["gated_deltanet"]

    def sequence(**x: torch.Tensor) -> torch.Tensor:
        return design.sequence(**x, backend="torch", chunk_size=C)

    found = counted(works.Work("", design.inputs, sequence), size, backward=False)
    useful = roofline.delta_operations(128, 128, C) / C
    assert 0.95 * useful < found < 1.2 * useful
    assert roofline.delta_operations(64, 64, 64) == 6 * 64**3 + 5 * 64**3 + 64**3 / 3


def test_the_backward_of_the_dense_filter_has_three_times_the_operations():
    size, C = Size(1, 2, 32, 128), 4
    work = works.bayesian(backend="torch", chunk_size=C)
    forward = counted(work, size, backward=False)
    both = counted(work, size, backward=True)
    assert 2.5 < both / forward - 1 < 3.3
    assert roofline.dense(64, 16, backward=True).operations == 3 * roofline.dense(64, 16).operations
    assert roofline.dense(128, 32).operations == pytest.approx(chunk_operations(128, 128, 32) / 32)


def test_bytes():
    """Counted by hand at D = 64, C = 32: four vectors in bfloat16, three scalars, and two matrices in 32 tokens."""
    assert roofline.dense(64, 32).bytes == 4 * 64 * 2 + 3 * 4 + 2 * 64 * 64 * 4 / 32
    assert roofline.dense(64, 32, element=4).bytes - roofline.dense(64, 32).bytes == 4 * 64 * 2
    small, large = roofline.dense(128, 32), roofline.dense(256, 32)
    assert large.bytes > 10 * small.bytes, "beyond what a chip holds, a belief passes by in every chunk"


def test_the_roof_is_the_lower_one():
    cost = roofline.Cost(operations=1000, bytes=10)
    assert cost.intensity == 100
    assert cost.nanoseconds(rate=1.0, bandwidth=1.0) == 1.0
    assert cost.nanoseconds(rate=1000.0, bandwidth=1.0) == 0.01


def test_the_page_has_its_numbers():
    """`PYTHONPATH=benchmarks python -m membydesign_bench.roofline docs/figures/roofline.png` prints them."""
    page = PAGE.read_text()
    assert roofline.table() in page
    assert roofline.estimates() in page
    assert re.search(r"no GPU timing", page)


def test_estimates_are_slower_than_the_limits():
    """Counts alone are a limit, not a time: ours is estimated at several times that of Gated DeltaNet."""
    for D, devices in roofline.ESTIMATES.items():
        for device, x in zip((roofline.A100, roofline.H100), devices, strict=True):
            limit = roofline.dense(D, 16).nanoseconds(device.float32, device.bandwidth) * roofline.TOKENS / 1e6
            assert limit < x.scalar < x.diagonal
            assert 6 < x.scalar / x.gated_deltanet < 15
            assert 28 < x.diagonal / x.gated_deltanet < 43


def test_the_figure(tmp_path):
    roofline.draw(str(tmp_path / "roofline.png"))
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
