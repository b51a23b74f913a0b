"""The seconds of all sessions of a result that was stopped and resumed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from membydesign.files import append_text, check_inside, parse_json

if TYPE_CHECKING:
    from typing_extensions import Self

FILE = "sessions.jsonl"
"""One line for each session that ended, also one that was stopped; a killed process leaves none."""


class Sessions:
    """Times this session, and adds those before it.

    Args:
        folder: of the result; None records nothing.
        resume: whether earlier sessions in the folder are of the same result; otherwise they are forgotten.
    """

    def __init__(self, folder: Path | None, *, resume: bool) -> None:
        self._file, self._resume = None if folder is None else Path(folder) / FILE, resume
        self._earlier: list[float] = []

    def __enter__(self) -> Self:
        if self._file is not None:
            if not self._resume:
                self._file.unlink(missing_ok=True)
            elif self._file.exists():
                lines = check_inside(self._file, self._file.parent).read_text(encoding="utf-8").splitlines()
                self._earlier = [float(parse_json(line)["seconds"]) for line in lines]
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and self._file.parent.is_dir():
            append_text(self._file, f'{{"seconds": {self._now():.2f}}}\n')

    def _now(self) -> float:
        return time.perf_counter() - self._started

    @property
    def seconds(self) -> float:
        """Seconds of all sessions, this one up to now."""
        return sum(self._earlier) + self._now()

    @property
    def count(self) -> int:
        """How many sessions there were, with this one."""
        return len(self._earlier) + 1
