"""flash-linear-attention's own kernels, forward and backward, equal the loop over tokens, where they can be run.

`.ci/environments` runs this in an environment of its own, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

import fla_interpreter
import membydesign as mbd
from fla_problems import OPERATIONS, assert_same, belief_for, everything, problem_of
from membydesign.filter import fla

pytestmark = pytest.mark.skipif(
    not fla_interpreter.READY, reason="flash-linear-attention and TRITON_INTERPRET=1 are needed"
)


@pytest.fixture(scope="module", autouse=True)
def in_the_interpreter():
    if not fla_interpreter.READY:
        return
    fla_interpreter.prepare(list(fla.MODULES.values()))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float16, 5e-3)])
def test_kernels_equal_the_loop(name, dtype, tolerance):
    """Two chunks, the second ragged; outputs, the memory at the end, and gradients of every input.

    NumPy, which multiplies in the interpreter, has float16 and no bfloat16.
    """
    design = mbd.catalogue[name]
    problem = problem_of(design, dtype, B=1, T=70, H=2, D=16, M=32)
    initial = belief_for(design, problem, B=1)
    found = everything(problem, initial, backend="fla")
    assert_same(found, everything(problem, initial, method="recurrent"), tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATIONS)
def test_packed_sequences(name):
    design = mbd.catalogue[name]
    problem = problem_of(design, B=1, T=90, H=1, D=16, M=16)
    initial = belief_for(design, problem, B=4).map(lambda x: x[:, :1])
    cu_seqlens = torch.tensor([0, 5, 5, 72, 90], dtype=torch.int32)
    found = everything(problem, initial, backend="fla", cu_seqlens=cu_seqlens)
    assert_same(found, everything(problem, initial, method="recurrent", cu_seqlens=cu_seqlens), 5e-6)
