"""Checkpoints: folders with weights, optimiser state and position of a run, written atomically."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from membydesign.files import PARTIAL, partial_folder, read_object, to_json, write_text
from membydesign.training.distributed import full_tensor, shard_like

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

PREFIX = "step-"
WEIGHTS, OPTIMISER, PLACE = "weights.safetensors", "optimiser.safetensors", "place.json"


NUMBERS: dict[str, type | tuple[type, ...]] = {
    "loss": (int, float),
    "seconds": (int, float),
    "total": (int, float),
    "counted": int,
}
"""What a position has besides its step, and the types."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written, or does not fit the run."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an earlier one is used instead."""


def save(
    directory: Path, model: nn.Module, optimiser: torch.optim.Optimizer, place: dict[str, Any], *, write: bool = True
) -> None:
    """Save everything a run needs to resume. Keeps the previous checkpoint and removes older ones.

    Args:
        directory: folder of the run, in which the checkpoint is a subfolder.
        model: model to save. All processes must call this function, because shards are gathered.
        optimiser: optimiser to save.
        place: position and identity of the run as JSON values; must contain "step".
        write: whether this process writes the files.

    Raises:
        CheckpointError: if writing fails, for instance because the disk is full; earlier checkpoints are kept.
    """
    weights, moments = _weights(model), _moments(model, optimiser)
    if not write:
        return
    final = directory / f"{PREFIX}{place['step']:08d}"
    partial = final.with_name(f"{final.name}{PARTIAL}")
    others = [path for path in complete_checkpoints(directory) if path != final]
    before = [path for path in others if path.name < final.name]
    try:
        partial = partial_folder(final)
        save_file(weights, partial / WEIGHTS)
        save_file(moments, partial / OPTIMISER)
        digests = {name: _digest(partial / name) for name in (WEIGHTS, OPTIMISER)}
        digests[PLACE] = _place_digest(place)
        write_text(partial / PLACE, to_json({**place, "sha256": digests}))
        for file in partial.iterdir():
            _sync(file)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = f"{before[-1]} is intact" if before else "there is no earlier one"
        raise CheckpointError(
            f"{final}: the checkpoint could not be written ({error}); {kept}; fix this and rerun the same command to "
            "resume"
        ) from error
    for old in others:
        if old != max(before, default=None):  # later ones are damaged, since the run was resumed before them
            shutil.rmtree(old, ignore_errors=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.suffix != PARTIAL and path.is_dir())


def remove_partial(directory: Path) -> None:
    """Remove checkpoints whose writing was interrupted."""
    for path in directory.glob(f"{PREFIX}*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


class Stored(NamedTuple):
    """A checkpoint as it was read.

    Attributes:
        path: its folder.
        place: position and identity of the run.
        weights: parameters and buffers by name.
        moments: state of the optimiser by name.
    """

    path: Path
    place: dict[str, Any]
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def read(directory: Path, *, report: bool = True) -> Stored | None:
    """Read the newest checkpoint that is intact; return None if there is no checkpoint.

    Args:
        directory: folder of the run.
        report: whether to warn about damaged checkpoints.

    Raises:
        CheckpointError: if all checkpoints are damaged, or the newest cannot be read for another reason.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(complete_checkpoints(directory)):
        try:
            stored = _read(path)
        except (FileNotFoundError, ValueError, SafetensorError) as error:
            damaged.append((path, str(error)))
            continue
        except OSError as error:  # it may be intact, and an older one would discard it
            raise CheckpointError(f"{path}: expected a checkpoint that can be read, got: {error}") from error
        for broken, reason in damaged if report else ():
            warnings.warn(
                f"{broken}: the checkpoint is damaged ({reason}); resuming from {path.name}, which is intact",
                CheckpointWarning,
                stacklevel=2,
            )
        return stored
    if damaged:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
        raise CheckpointError(
            f"{damaged[0][0]}: expected a complete checkpoint, and no checkpoint of this run is intact ({reasons}); "
            "remove the folders of its checkpoints to restart the run"
        )
    return None


def _read(path: Path) -> Stored:
    """Read a checkpoint; raise ValueError if it is not what was written."""
    place = read_object(path / PLACE)
    if not isinstance(place.get("sha256"), dict):
        raise ValueError(f"{PLACE}: expected a position with digests, got {place.get('sha256')!r} for sha256")
    digests = place.pop("sha256")
    # Version 0.1.0 wrote no settings, and no digest of the position itself.
    if ("settings" in place or PLACE in digests) and digests.get(PLACE) != _place_digest(place):
        raise ValueError(f"{PLACE} is not what was written")
    if place.get("step") != int(path.name.removeprefix(PREFIX)):
        raise ValueError(f"{PLACE}: step: expected that of the folder, got {place.get('step')!r}")
    for name, kinds in NUMBERS.items():
        value = place.setdefault(name, 0)
        if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{PLACE}: {name}: expected a number, got {value!r}")
    for name in (WEIGHTS, OPTIMISER):
        if _digest(path / name) != digests.get(name):
            raise ValueError(f"{name} is not what was written")
    return Stored(path, place, load_file(path / WEIGHTS), load_file(path / OPTIMISER))


def put(stored: Stored, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Load a checkpoint into model and optimiser.

    Raises:
        CheckpointError: if it belongs to another model.
    """
    try:
        _put_weights(model, stored.weights)
        _put_moments(model, optimiser, stored.moments)
    except ValueError as error:
        raise _of_another_model(stored.path, error) from error


def check_fits(stored: Stored, model: nn.Module) -> None:
    """Raise CheckpointError if a checkpoint belongs to another model."""
    try:
        _check_weights(model, stored.weights)
    except ValueError as error:
        raise _of_another_model(stored.path, error) from error


def _of_another_model(path: Path, error: ValueError) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected the weights of this model, got others: {error}; resume with the model of this run, or "
        "choose another folder"
    )


def _check_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    current = _once(model)
    if set(current) != set(weights):
        raise ValueError(f"only the model or only the checkpoint has {', '.join(sorted(set(current) ^ set(weights)))}")
    for name, value in current.items():
        if value.shape != weights[name].shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)} in the model and {list(weights[name].shape)} in the checkpoint"
            )


@torch.no_grad()
def _put_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    _check_weights(model, weights)
    for name, value in _once(model).items():
        value.copy_(shard_like(weights[name].to(value.device), value))


def _put_moments(model: nn.Module, optimiser: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    trained = _trained(model, optimiser)
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in moments.items():
        name, _, what = key.rpartition("/")
        state.setdefault(name, {})[what] = value
    if not set(state) <= set(trained):  # the reverse may happen: parameters that never had a gradient have no moments
        untrained = ", ".join(sorted(set(state) - set(trained)))
        raise ValueError(f"{untrained} are trained in the checkpoint but not in this run")
    for name, values in state.items():
        moved = {what: x if x.ndim == 0 else x.to(trained[name].device) for what, x in values.items()}
        optimiser.state[trained[name]] = {what: shard_like(x, trained[name]) for what, x in moved.items()}


def _moments(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by parameter name."""
    return {
        f"{name}/{what}": full_tensor(torch.as_tensor(value)).contiguous().cpu()
        for name, parameter in _trained(model, optimiser).items()
        for what, value in optimiser.state[parameter].items()
    }


def _trained(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of the optimiser by name."""
    trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if id(p) in trained}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, gathered from shards."""
    return {name: full_tensor(value).contiguous().cpu() for name, value in _once(model).items()}


def _once(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers to save; tied weights appear once."""
    saved = set(model.state_dict())
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: x.detach() for name, x in named if name in saved}


def _place_digest(place: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
