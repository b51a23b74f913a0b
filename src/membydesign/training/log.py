"""The log of a run: JSON lines that never contradict its checkpoints."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from membydesign.files import append_text, parse_json, write_text
from membydesign.training.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG = "log.jsonl"


def _step_of(line: str) -> float:
    """Return the step of a log line; infinite if a crash has garbled it."""
    try:
        return parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Log:
    """A log of JSON lines; lines written after the checkpoint that a run resumes from are dropped.

    Args:
        directory: folder of the run; None to write nothing.
        step: step of the checkpoint that the run resumes from; 0 without one.
    """

    def __init__(self, directory: Path | None, step: int) -> None:
        self.path = None if directory is None else directory / LOG
        if self.path is not None and self.path.exists():
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
            if kept != lines:
                with self._explained():
                    write_text(self.path, "".join(kept))

    def write(self, **line: float) -> None:
        """Append a line."""
        if self.path is not None:
            with self._explained():
                append_text(self.path, json.dumps(line) + "\n")

    def sync(self) -> None:
        """Flush the log to disk, so that it is never behind a checkpoint."""
        if self.path is not None and self.path.exists():
            with self._explained(), self.path.open("rb+") as file:
                os.fsync(file.fileno())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the log could not be written ({error}); the checkpoints are intact; fix this and rerun "
                "the same command to resume"
            ) from error
