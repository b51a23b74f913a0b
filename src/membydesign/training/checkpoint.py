"""Checkpoints: a folder with weights, optimiser and place, that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from membydesign.files import to_json, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PREFIX = "step-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or was made with other settings."""


def save(directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer, place: dict[str, Any]) -> None:
    """Save everything that a run needs to go on; the checkpoint before is removed once this one is complete.

    Args:
        directory: of the run; the checkpoint is a folder in it.
        model: its weights.
        optimiser: its state.
        place: where the run stands, with "step"; anything that JSON holds.
    """
    final = directory / f"{PREFIX}{place['step']:08d}"
    partial = directory / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_weights(model), partial / "weights.safetensors")
    moments = {
        f"{index}/{name}": value.contiguous() if isinstance(value, torch.Tensor) else torch.tensor(value)
        for index, state in optimiser.state_dict()["state"].items()
        for name, value in state.items()
    }
    save_file(moments, partial / "optimiser.safetensors")
    write_text(partial / "place.json", to_json(place))
    for file in partial.iterdir():
        _sync(file)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    _sync(directory)
    for old in found(directory):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def found(directory: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.suffix != ".partial" and path.is_dir())


def load(directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put the newest checkpoint of a run into model and optimiser; returns its place, or None if there is none."""
    checkpoints = found(directory)
    if not checkpoints:
        return None
    path = checkpoints[-1]
    try:
        weights = load_file(path / "weights.safetensors")
        moments = load_file(path / "optimiser.safetensors")
        place = json.loads((path / "place.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: expected a complete checkpoint, and it cannot be read ({error}); "
            "remove this folder to start the run again"
        ) from error
    try:
        model.load_state_dict(weights, strict=False)
        missing = set(_weights(model)) - set(weights)
        if missing:
            raise ValueError(f"no weights for {', '.join(sorted(missing))}")
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected the weights of this model, and they do not fit: {error}") from error
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = value
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
    return place


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each storage once (tied weights are one)."""
    seen: set[int] = set()
    kept = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() in seen and value.numel():
            continue
        seen.add(value.data_ptr())
        kept[name] = value.contiguous()
    return kept


def _sync(path: Path) -> None:
    """Make sure that a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
