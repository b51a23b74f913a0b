"""Whether a resumed run is the run that was started: its settings and its data."""

from __future__ import annotations

import ctypes
import hashlib
import json
from typing import TYPE_CHECKING, Any

from membydesign.files import to_json
from membydesign.training.settings import MAY_CHANGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SHOWN = 4
"""Differences that an error lists."""


def plain(value: Any) -> Any:
    """Return a value as JSON would store it, so that it can be compared with a stored one."""
    return json.loads(to_json(value))


def differences(stored: Any, requested: Any) -> str:
    """List the settings that differ, with both values; empty if there are none.

    Args:
        stored: settings as JSON values, possibly nested.
        requested: settings to compare with.
    """
    ours, theirs = _flat(stored), _flat(requested)
    missing = "nothing"
    changed = [
        f"{name}: stored {ours.get(name, missing)!r}, requested {theirs.get(name, missing)!r}"
        for name in sorted({*ours, *theirs})
        if ours.get(name, missing) != theirs.get(name, missing) and name.rpartition(".")[2] not in MAY_CHANGE
    ]
    more = f"; and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return "; ".join(changed[:SHOWN]) + more


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested settings to {"train.steps": 20}."""
    if not isinstance(value, dict):
        return {name or "settings": value}
    return {
        key: leaf
        for part, inner in value.items()
        for key, leaf in _flat(inner, f"{name}.{part}" if name else str(part)).items()
    }


def batch_digest(batch: Mapping[str, Tensor]) -> str:
    """Compute a digest of the names, types, shapes and values of a batch."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        x = batch[name].detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b"")
    return digest.hexdigest()
