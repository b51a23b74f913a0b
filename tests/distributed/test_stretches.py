"""Sequences that are split in time over processes: filters, layers and models equal those of one process."""

import subprocess
import sys

import pytest

from distributed.processes import launch

FILTERS = (
    "check_scan",
    "check_pipeline",
    "check_packed_sequences",
    "check_float32",
    "check_bytes_do_not_depend_on_the_length",
    "check_two_exchanges",
    "check_gradients_of_some_arguments",
    "check_refusals",
)
EVERY = ("check_every_design", "check_every_design_in_float32", "check_every_design_packed")
LAYERS = ("check_layers", "check_convolutions_in_a_pipeline")
MODELS = (
    "check_twenty_steps",
    "check_a_scan",
    "check_ddp",
    "check_fsdp",
    "check_gradient_checkpointing",
    "check_packed_loss_and_gradients",
    "check_a_stretch_for_one_call",
    "check_refusals",
)


def passed(results, name):
    assert results.get(name, "not run, since an earlier check failed") == "passed", results.get(name)


@pytest.fixture(scope="module")
def filters():
    return launch("checks_of_stretches")


@pytest.mark.parametrize("name", FILTERS)
def test_filters(filters, name):
    passed(filters, name)


@pytest.fixture(scope="module")
def layers():
    return launch("checks_of_split_layers")


@pytest.mark.parametrize("name", LAYERS)
def test_layers(layers, name):
    passed(layers, name)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["checks_of_stretches", "checks_of_split_layers"])
def test_filters_and_layers_in_four_processes(module):
    for name, result in launch(module, processes=4).items():
        assert result == "passed", (name, result)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_design(processes):
    results = launch("checks_of_every_design", processes)
    for name in EVERY:
        passed(results, name)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_models(processes):
    results = launch("checks_of_split_models", processes)
    for name in MODELS:
        passed(results, name)


def test_a_stretch_needs_a_process_group():
    program = """
import torch, membydesign as mbd
try:
    mbd.Stretch.of(torch.zeros(1, 3))
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], check=True, timeout=300, capture_output=True, text=True)
    assert result.stdout.startswith("group: expected torch.distributed.init_process_group to be called first, got no")
