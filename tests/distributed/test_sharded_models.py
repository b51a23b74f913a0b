"""Models whose heads, weights or batch are sharded over two processes train and generate as in one process."""

import pytest

from distributed.processes import launch

MODELS = (
    "check_tensor_parallel",
    "check_tensor_parallel_with_convolutions_and_tied_weights",
    "check_heads_that_cannot_be_split_are_refused",
    "check_fully_shard",
    "check_a_batch_that_is_sharded",
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models():
    return launch("checks_of_models")


@pytest.mark.parametrize("name", MODELS)
def test_sharded_models(models, name):
    assert models.get(name, "not run, since an earlier check failed") == "passed", models.get(name)
