"""The designs of examples/designs/, which a user could have written, as modules and by name."""

import importlib.util
import sys
from pathlib import Path

import pytest

import membydesign as mbd
import membydesign.layers

FOLDER = Path(__file__).parents[2] / "examples" / "designs"
FILES = sorted(FOLDER.glob("*.py"))


def load(name: str):
    """A file of the folder as a module; dataclasses look their module up in sys.modules."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


student_t = load("student_t_write")
blocks = load("block_diagonal")
rwkv7 = load("rwkv7_transition")
counts = load("count_memory")

DESIGNS: dict[str, mbd.Design] = {
    "student_t": mbd.DesignModel(mbd.DiagonalDecay(), student_t.StudentTWrite(nu=4), mbd.Dense()),
    "blocks": mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), blocks.BlockDiagonal(size=2)),
    "rwkv7_by_hand": mbd.DesignModel(rwkv7.RWKV7Transition(), mbd.LatentInput(), mbd.MeanOnly()),
    "counts": counts.CountMemory(),
}
for name, design in DESIGNS.items():
    mbd.layers.register(name, design)

each_design = pytest.mark.parametrize("name", DESIGNS)
