"""DTensors are filtered shard by shard, with the results of plain tensors: two processes run the checks."""

import subprocess
import sys

import pytest

from distributed.processes import launch

FILTERS = (
    "check_batch",
    "check_heads",
    "check_replicated",
    "check_uneven_and_empty_shards",
    "check_packed_sequences",
    "check_mixed_placements",
    "check_refusals",
    "check_layer",
)


@pytest.fixture(scope="module")
def filters():
    return launch("checks_of_filters")


@pytest.mark.parametrize("name", FILTERS)
def test_filters_of_dtensors(filters, name):
    assert filters.get(name, "not run, since an earlier check failed") == "passed", filters.get(name)


def test_dtensors_are_not_imported_before_there_is_one():
    program = """
import sys, torch, membydesign as mbd
x = torch.randn(1, 3, 1, 4)
out = mbd.filter_sequence(mbd.catalogue["linear_attention"], x, x, x, prior_variance=1.0, write_noise=0.0)
assert "torch.distributed.tensor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
