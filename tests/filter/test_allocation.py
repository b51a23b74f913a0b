"""Native code that cannot allocate its workspace says so, and a long chunk does not need a large one."""

import os
import subprocess
import sys
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign.filter.native import build, diagonal, step, structs
from problems import DESIGNS, random_problem

ENORMOUS = {1: 1 << 45, 8: 1 << 28}
"""Chunk sizes whose workspace no address space has: it grows with C token by token, and with C² in chunks."""

PROGRAM = """
import resource, sys
import torch, membydesign as mbd
T, limit = int(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
torch.manual_seed(0)
design = mbd.catalogue[sys.argv[3]]
x = torch.randn(1, T, 1, 4) / 2
parameters = {p.name: -0.1 if p.bound == "<= 0" else 0.5 for p in design.step_parameters}
backend = sys.argv[4]
sizes = (64, T) if backend == "native" else (T,)
filtered = [
    mbd.filter_sequence(design, x, x, x, chunk_size=size, backend=backend, **parameters).output for size in sizes
]
assert torch.allclose(filtered[0], filtered[-1], atol=1e-4)
print("done")
"""


@pytest.mark.parametrize(
    ("T", "gigabytes", "name", "backend"),
    [
        pytest.param(200_000, 0, "bayesian_layer", "native", marks=pytest.mark.slow),
        (20_000, 6, "bayesian_layer", "native"),
        pytest.param(200_000, 0, "gated_deltanet", "native", marks=pytest.mark.slow),
        pytest.param(20_000, 4, "gated_deltanet", "torch", marks=pytest.mark.slow),
    ],
)
def test_a_chunk_as_long_as_the_sequence_needs_no_more_memory(T, gigabytes, name, backend):
    command = [sys.executable, "-c", PROGRAM, str(T), str(gigabytes << 30), name, backend]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.stdout == "done\n", (done.returncode, done.stderr)


def without_room(monkeypatch, field: str, number: int) -> None:
    """Put a number into the structs of native code that asks for an enormous workspace."""
    fill = structs.Struct.fill

    def filled(self, values):
        if field in self.fields:
            values = {**values, field: number}
        return fill(self, values)

    monkeypatch.setattr(structs.Struct, "fill", filled)


@pytest.mark.parametrize(
    ("design", "size", "backwards"),
    [
        ("dense-scalar", 1, True),  # forward token by token needs a few rows only, and so do means without a covariance
        ("dense-scalar", 8, False),
        *product(("dense-scalar", "reset-scalar", "additive-diagonal"), (8,), (True,)),
    ],
)
def test_a_workspace_that_cannot_be_allocated_is_a_memory_error(design, size, backwards, monkeypatch):
    problem = random_problem(DESIGNS[design], B=1, T=9).map(lambda x: x.requires_grad_())
    run = partial(problem.filter, backend="native", chunk_size=size)
    if backwards:
        run = run().output.sum().backward
    without_room(monkeypatch, "C", ENORMOUS[size])
    with pytest.raises(MemoryError, match=r"\.c: expected \d+ bytes .* of workspace for each thread, got none"):
        run()


@pytest.mark.parametrize("rows", [1 << 50, 1 << 62])  # that fit into an address space, and that do not
def test_so_is_that_of_the_diagonal_covariance_and_of_a_decoding_step(rows, monkeypatch):
    problem = random_problem(DESIGNS["diagonal-scalar"], B=1, T=3)
    belief = problem.filter().belief
    without_room(monkeypatch, "D", rows)
    step._plan.cache_clear()
    try:
        with pytest.raises(MemoryError, match=f"{diagonal.SOURCE}: expected"):
            problem.filter(backend="native")
        with pytest.raises(MemoryError, match=f"{step.SOURCE}: expected"):
            problem.step(belief, 0)
    finally:
        step._plan.cache_clear()


FAILING = """
#include <stdlib.h>
#include <stdatomic.h>
static atomic_int calls, open_rooms;
int still_open(void) { return atomic_load(&open_rooms); }
static void *every_second(size_t alignment, size_t n) {
  if (atomic_fetch_add(&calls, 1) % 2) return NULL;
  atomic_fetch_add(&open_rooms, 1);
  return aligned_alloc(alignment, n);
}
static void counted(void *p) {
  if (p) atomic_fetch_sub(&open_rooms, 1);
  free(p);
}
#define aligned_alloc every_second
#define free counted
"""


def test_one_thread_of_several_without_room_is_reported_and_nothing_leaks(tmp_path, monkeypatch):
    (tmp_path / "failing.h").write_text(FAILING)
    monkeypatch.setenv("MEMBYDESIGN_CFLAGS", f"-O0 -include '{tmp_path / 'failing.h'}'")  # compiled in a second
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: dict[tuple[str, torch.dtype], Any] = {}

    def library(source, dtype):
        if (source, dtype) not in compiled:
            compiled[source, dtype] = build._compiled(source, build.REALS[dtype])
        return compiled[source, dtype]

    monkeypatch.setattr(build, "library", library)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    structs.function.cache_clear()
    try:
        problem = random_problem(DESIGNS["diagonal-scalar"], B=4, T=5, dtype=torch.float32)
        for _ in range(3):
            with pytest.raises(MemoryError, match=diagonal.SOURCE):
                problem.filter(backend="native")
        assert compiled[diagonal.SOURCE, torch.float32].still_open() == 0
    finally:
        structs.function.cache_clear()


def test_sizes_of_zero_are_refused_by_name():
    for shape in ((0, 3, 2, 4), (1, 0, 2, 4), (1, 3, 0, 4), (1, 3, 2, 0)):
        x = torch.zeros(shape)
        with pytest.raises(ValueError, match="q: expected at least one element along every axis"):
            mbd.filter_sequence(mbd.catalogue["linear_attention"], x, x, x, prior_variance=1.0, write_noise=0.0)
