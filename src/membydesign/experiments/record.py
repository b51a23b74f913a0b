"""What a run found, beside what the paper printed, with the command, preset and commit that made it."""

from __future__ import annotations

import json
import math
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import membydesign
from membydesign.experiments import page, page_markdown
from membydesign.experiments.comparison import (
    About,
    Bound,
    Check,
    Comparison,
    Ordering,
    Value,
    by_claim,
    check_of,
    claims_held,
    claims_verdict,
    failing,
    highest,
    lowest,
    printed,
    rising,
    verdict,
)
from membydesign.experiments.verdict import Judge
from membydesign.files import to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "About",
    "Bound",
    "Check",
    "Comparison",
    "Ordering",
    "Outcome",
    "Provenance",
    "Record",
    "RecordTable",
    "by_claim",
    "claims_held",
    "claims_verdict",
    "commit",
    "comparisons_of",
    "failing",
    "highest",
    "lowest",
    "printed",
    "read",
    "rising",
    "verdict",
    "write",
]


@dataclass(frozen=True)
class RecordTable:
    """A table of the report, for what the paper prints no number of.

    Attributes:
        title: what it shows.
        headings: one for each column.
        rows: cells; numbers are shown to four digits, so give a text where that will not do.
        note: what a reader should know about it, in Markdown.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.headings):
                expected = f"expected {len(self.headings)} cells in each row of {self.title!r}"
                raise ValueError(f"rows: {expected}, got {list(row)}")


@dataclass(frozen=True)
class Outcome:
    """What `run` of an experiment returns.

    Attributes:
        config: the settings, a frozen dataclass.
        comparisons: everything that the paper states and that was checked.
        metrics: everything else worth keeping, as plain numbers, lists and dictionaries.
        notes: what a reader should know, one sentence or two each, in Markdown.
        data: what the figures need; not written to disk.
        tables: what else the report shows.
    """

    config: Any
    comparisons: Sequence[Check]
    metrics: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    data: Any = None
    tables: Sequence[RecordTable] = field(default_factory=list)


@dataclass(frozen=True)
class Provenance:
    """How a result came about, so that anyone can make it again."""

    experiment: str
    preset: str
    command: str
    commit: str
    date: str
    seconds: float
    versions: dict[str, str]

    @staticmethod
    def now(experiment: str, preset: str, seconds: float) -> Provenance:
        """The provenance of a run that has just ended."""
        return Provenance(
            experiment=experiment,
            preset=preset,
            command=command(sys.argv),
            commit=commit(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(seconds, 2),
            versions={
                "membydesign": membydesign.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
            },
        )


def command(words: Sequence[str]) -> str:
    """What was typed, as one types it: `python -m membydesign.cli` is `mbd`."""
    program = Path(words[0]).name
    return shlex.join(["mbd" if program == "__main__.py" else program, *words[1:]])


@cache
def commit() -> str:
    """The commit of the source, marked if the package differs from it; "unknown" outside a checkout.

    Looked up once in a process: call it before long work, since what is imported stays while a checkout may move on.
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


@dataclass(frozen=True)
class Record:
    """A result as its folder holds it.

    Attributes:
        directory: the folder.
        title: one line that says which claim is reproduced.
        provenance: how it came about.
        comparisons: the paper's statements beside ours.
        tables: what else there is to show.
        notes: what a reader should know, in Markdown.
        figures: {caption: file}; a file may be missing.
    """

    directory: Path
    title: str
    provenance: Provenance
    comparisons: list[Check]
    tables: list[RecordTable]
    notes: list[str]
    figures: dict[str, Path]

    @property
    def judge(self) -> Judge:
        """Says which claims hold, if the preset tests them."""
        return Judge.of(self.provenance.preset)

    @property
    def missing_figures(self) -> list[Path]:
        """The figures that are not there."""
        return [path for path in self.figures.values() if not path.is_file()]


def write(directory: Path, outcome: Outcome, provenance: Provenance, title: str, figures: dict[str, Path]) -> Path:
    """Write `config.json`, `metrics.json` and `report.md` beside the figures; returns the report."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(outcome.config) if is_dataclass(outcome.config) else outcome.config  # pyright: ignore[reportArgumentType]
    write_text(directory / "config.json", to_json({"preset": provenance.preset, **config}))
    tested = Judge.of(provenance.preset).tests
    metrics = {
        "title": title,
        "provenance": asdict(provenance),
        "comparisons": [c.as_dict(tested=tested) for c in outcome.comparisons],
        "tables": [asdict(table) for table in outcome.tables],
        "notes": outcome.notes,
        "figures": {caption: path.name for caption, path in figures.items()},
        "metrics": outcome.metrics,
    }
    write_text(directory / "metrics.json", to_json(_words_for_infinite(metrics)))
    report = directory / "report.md"
    write_text(report, page_markdown.markdown(page.result(read(directory)), directory))
    return report


def read(directory: Path) -> Record:
    """The result in a folder, also one of an older version; ValueError that names the file if it is not one."""
    path = directory / "metrics.json"
    try:
        return _record(directory, json.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        raise ValueError(f"{path}: expected a result of mbd reproduce, got one without {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a result of mbd reproduce, got an error: {error}") from error


def _record(directory: Path, metrics: dict[str, Any]) -> Record:
    made = {each.name: metrics["provenance"][each.name] for each in fields(Provenance)}
    names = metrics.get("figures")
    if names is None:  # an older version: the file names are all there is to say
        names = {path.stem.replace("_", " "): path.name for path in sorted(directory.glob("*.png"))}
    for name in names.values():
        if Path(name).name != name:
            raise ValueError(f"figures: expected names of files in the same folder, got {name!r}")
    record = Record(
        directory=directory,
        title=str(metrics.get("title") or directory.resolve().name),
        provenance=Provenance(**made),
        comparisons=comparisons_of(metrics),
        tables=[RecordTable(**_numbers_for_words(table)) for table in metrics.get("tables", [])],
        notes=[str(note) for note in metrics.get("notes", [])],
        figures={caption: directory / name for caption, name in names.items()},
    )
    page.result(record)  # what cannot be shown is refused here, where the file is known
    return record


def comparisons_of(metrics: dict[str, Any]) -> list[Check]:
    """The comparisons that a `metrics.json` holds."""
    return [check_of(_numbers_for_words(row)) for row in metrics["comparisons"]]


_INFINITE = ("nan", "inf", "-inf")


def _words_for_infinite(value: Any) -> Any:
    """JSON has no NaN and no infinity; a run that diverged is worth a record all the same."""
    if isinstance(value, dict):
        return {key: _words_for_infinite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_words_for_infinite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers_for_words(value: Any) -> Any:
    """The numbers that `_words_for_infinite` spelt out."""
    if isinstance(value, dict):
        return {key: _numbers_for_words(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_numbers_for_words(x) for x in value]
    return float(value) if isinstance(value, str) and value in _INFINITE else value
