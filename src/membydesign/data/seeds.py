"""Named random streams: train, validation and test never share one, and no draw depends on another."""

from __future__ import annotations

import hashlib

import torch


def seed_from(text: str) -> int:
    """Return a 63-bit seed derived from the SHA-256 hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*path: str | int) -> torch.Generator:
    """Return the random generator that a path names, for example `generator("recall", "test", seed, step)`.

    The streams of different paths are independent, in whatever order and process they are created.
    """
    return torch.Generator().manual_seed(seed_from("/".join(map(repr, path))))
