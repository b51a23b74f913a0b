"""Checkpoints: a folder with weights, optimiser and place, that is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from membydesign.files import to_json, write_text
from membydesign.training.processes import like, whole

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PREFIX = "step-"
WEIGHTS, OPTIMISER, PLACE = "weights.safetensors", "optimiser.safetensors", "place.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written, or was made with other settings."""


def save(
    directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer, place: dict[str, Any], *, write: bool = True
) -> None:
    """Save everything that a run needs to go on. The last checkpoint is kept, and those before it are removed.

    Args:
        directory: of the run; the checkpoint is a folder in it.
        model: its weights. Shards are gathered, so that all processes must call this.
        optimiser: its state.
        place: where the run stands, with "step"; anything that JSON holds.
        write: whether this process is the one that writes.

    Raises:
        CheckpointError: if it cannot be written, for instance on a full disk; those before are as they were.
    """
    weights, moments = _weights(model), _moments(model, optimiser)
    if not write:
        return
    final = directory / f"{PREFIX}{place['step']:08d}"
    partial = directory / f"{final.name}.partial"
    before = [path for path in found(directory) if path != final]
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(weights, partial / WEIGHTS)
        save_file(moments, partial / OPTIMISER)
        digests = {name: _digest(partial / name) for name in (WEIGHTS, OPTIMISER)}
        write_text(partial / PLACE, to_json({**place, "sha256": digests}))
        for file in partial.iterdir():
            _sync(file)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = f"{before[-1]} is intact" if before else "there is none before it"
        raise CheckpointError(
            f"{final}: the checkpoint could not be written ({error}); {kept}, and the same command goes on from there "
            "once this is mended"
        ) from error
    for old in before[:-1]:
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
        place = json.loads((path / PLACE).read_text(encoding="utf-8"))
        for name, digest in place.pop("sha256").items():
            if _digest(path / name) != digest:
                raise ValueError(f"{name} is not what was written")
        weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMISER)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        start = f"go on from {checkpoints[-2].name}" if len(checkpoints) > 1 else "start the run again"
        raise CheckpointError(
            f"{path}: expected a complete checkpoint, and it cannot be read ({error}); remove this folder to {start}"
        ) from error
    try:
        _put_weights(model, weights)
        _put_moments(model, optimiser, moments)
    except ValueError as error:
        raise CheckpointError(f"{path}: expected the weights of this model, and they do not fit: {error}") from error
    return place


@torch.no_grad()
def _put_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    here = _once(model)
    if set(here) != set(weights):
        raise ValueError(f"the names {', '.join(sorted(set(here) ^ set(weights)))} are on one side alone")
    for name, value in here.items():
        if value.shape != weights[name].shape:
            raise ValueError(f"{name} has shape {list(value.shape)} here and {list(weights[name].shape)} there")
        value.copy_(like(weights[name].to(value.device), value))


def _put_moments(model: nn.Module, optimiser: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    trained = _trained(model, optimiser)
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in moments.items():
        name, _, what = key.rpartition("/")
        state.setdefault(name, {})[what] = value
    if not set(state) <= set(trained):  # what never had a gradient has no moments
        raise ValueError(f"{', '.join(sorted(set(state) - set(trained)))} are trained there and not here")
    for name, values in state.items():
        moved = {what: x if x.ndim == 0 else x.to(trained[name].device) for what, x in values.items()}
        optimiser.state[trained[name]] = {what: like(x, trained[name]) for what, x in moved.items()}


def _moments(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, by names of parameters."""
    return {
        f"{name}/{what}": whole(torch.as_tensor(value)).contiguous().cpu()
        for name, parameter in _trained(model, optimiser).items()
        for what, value in optimiser.state[parameter].items()
    }


def _trained(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimiser has, by name."""
    trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if id(p) in trained}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, whole."""
    return {name: whole(value).contiguous().cpu() for name, value in _once(model).items()}


def _once(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are saved, each once: tied weights are one."""
    saved = set(model.state_dict())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: x.detach() for name, x in named if name in saved}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Make sure that a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
