"""Pages made from the code: one for each design of the catalogue, each command and each claim of the paper."""

from __future__ import annotations

from website import catalogue, claims, commands


def pages() -> dict[str, str]:
    """Return every page, by its path below docs/."""
    return {**catalogue.pages(), **commands.pages(), **claims.pages()}
