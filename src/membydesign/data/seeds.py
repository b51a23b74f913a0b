"""Random streams by name, so that train, validation and test never share one and no draw depends on another."""

from __future__ import annotations

import hashlib

import torch


def generator(*path: str | int) -> torch.Generator:
    """A generator of its own for every path, for example `generator("recall", "test", seed, step)`.

    Streams of different paths have nothing to do with each other, in whatever order, process or number they are made.
    """
    digest = hashlib.sha256("/".join(map(repr, path)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
