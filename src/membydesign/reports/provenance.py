"""The command, preset, commit and versions that made a result."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import membydesign

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Provenance:
    """What made a result, so that anyone can make it again.

    Attributes:
        experiment: its name.
        preset: the name of its settings.
        command: as it was typed.
        commit: of the source.
        date: when the last session ended.
        seconds: of all sessions together.
        versions: of the package and what it runs on.
        sessions: how many there were; 0 if only the last one was recorded, as older versions did.
    """

    experiment: str
    preset: str
    command: str
    commit: str
    date: str
    seconds: float
    versions: dict[str, str]
    sessions: int = 0

    @staticmethod
    def now(experiment: str, preset: str, seconds: float, sessions: int = 1) -> Provenance:
        """Return the provenance of a run that has just ended."""
        return Provenance(
            experiment=experiment,
            preset=preset,
            command=command(sys.argv),
            commit=commit(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(seconds, 2),
            sessions=sessions,
            versions={
                "membydesign": membydesign.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
            },
        )


def command(words: Sequence[str]) -> str:
    """Return the command as it was typed; `python -m membydesign.cli` becomes `mbd`."""
    program = Path(words[0]).name
    return shlex.join(["mbd" if program == "__main__.py" else program, *words[1:]])


@cache
def commit() -> str:
    """Return the commit of the source, marked if the package differs from it; "unknown" outside a checkout.

    Cached per process: call it before long work, because the checkout may change while the process runs.
    """
    package = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", __file__)
        changed = git("status", "--porcelain", "--", str(package))
        return (git("rev-parse", "HEAD") + (" (with uncommitted changes)" if changed else "")) if tracked else "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
