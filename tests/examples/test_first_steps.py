"""The notebook: its cells run in order, and what it says of their results is so."""

import contextlib
import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def cells(kind):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_outputs_are_stripped():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in cells("code"):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_all_cells_run_and_keep_their_promises(monkeypatch):
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    found: dict[str, Any] = {"__name__": "notebook"}
    printed = []
    monkeypatch.setitem(found, "print", lambda *words: printed.append(" ".join(map(str, words))))
    try:
        for cell in cells("code"):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), found)
        assert len(plt.get_fignums()) == 4
    finally:
        plt.close("all")
        with contextlib.suppress(ImportError):
            matplotlib.use(backend)
    assert found["angle"] > 15
    assert found["curves"]["bayesian_layer"][-1] > 0.6
    assert found["curves"]["gated_deltanet"][-1] < 0.5
    assert found["accuracy"] > 0.9
    assert found["auroc"] > 0.9
    assert found["own_accuracy"] > 0.9
    assert any("Half of it fades" in text for text in printed)
    assert found["mine"].exactness == "exact filter"
    assert torch.is_grad_enabled()
