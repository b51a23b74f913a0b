"""Pages made from the code: one for each design of the catalogue, each command and each claim, and the explorer."""

from __future__ import annotations

from membydesign import __version__, explore
from website import catalogue, claims, commands


def pages() -> dict[str, str]:
    """Return every page, Markdown or HTML, by its path below docs/."""
    made = {**catalogue.pages(), **commands.pages(), **claims.pages()}
    return {**made, "explorer.html": explore.page(__version__)}
