"""Derive the settings of a run from those of its experiment, so that each field is stated once."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def shared_values(kind: type[DataclassInstance], source: DataclassInstance) -> dict[str, Any]:
    """Return the values of those fields of `source` that the dataclass `kind` has too."""
    names = {each.name for each in fields(kind)}
    return {each.name: getattr(source, each.name) for each in fields(source) if each.name in names}
