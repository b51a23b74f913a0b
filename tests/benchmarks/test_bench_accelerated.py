"""The section `accelerate` of the benchmark, at a tiny size."""

import pytest
import torch

pytest.importorskip("transformers")
from membydesign_bench import accelerated
from membydesign_bench.problem import Size


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(accelerated, "VOCABULARY", 50)
    monkeypatch.setattr(accelerated, "BLOCKS", 4)
    monkeypatch.setattr(accelerated, "DECODED", 2)


@pytest.mark.parametrize("family", accelerated.MODELS)
def test_what_is_measured(family, monkeypatch):
    def timed(works, *_):
        return {name: (work(), 2.0)[1] for name, work in works.items()}

    monkeypatch.setattr(accelerated, "interleaved", timed)
    rows = accelerated._times(family, Size(1, 2, 64, 16), 1)
    assert [row.task.split(",")[0] for row in rows] == [
        "training step",
        "prefill",
        "decoding",
        "kernels of a training step",
        "share of the kernels in it",
    ]
    assert [row.ratio for row in rows] == [1.0] * 5
    layers = 8 if family == "mamba2" else 3
    assert rows[3].value == 2.0 * layers


def test_kernels_are_given_what_the_layer_gives_them():
    model = accelerated.build("qwen3_5", Size(1, 2, 64, 16))
    calls = accelerated.kernel_calls(model, torch.tensor([[1, 2, 3]]))
    assert set(calls) == {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}
    assert calls["torch_chunk_gated_delta_rule"][0][0].shape == (1, 3, 2, 16)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.slow
def test_memory_of_training():
    [row] = accelerated._memory("qwen3_5", Size(1, 2, 64, 16))
    assert row.value is not None
    assert row.value > 0
