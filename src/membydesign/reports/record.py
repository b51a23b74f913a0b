"""Write the outcome of an experiment into its folder, and read it back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membydesign.files import check_inside, parse_json, read_object, to_json, write_text
from membydesign.reports import page, page_markdown
from membydesign.reports.comparison import check_of
from membydesign.reports.provenance import Provenance
from membydesign.reports.verdict import Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.reports.comparison import Check, Value


@dataclass(frozen=True)
class RecordTable:
    """A table of the report, for results that have no counterpart in the paper.

    Attributes:
        title: what it shows.
        headings: one for each column.
        rows: cells; numbers are shown to four digits, texts as they are.
        note: a remark below the table, in Markdown.
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
    """The return value of `run` of an experiment.

    Attributes:
        config: the settings, a frozen dataclass.
        comparisons: the claims of the paper, compared with our results.
        metrics: all other results to keep, as plain numbers, lists and dictionaries.
        notes: remarks for the reader, in Markdown.
        data: what the figures need; not written to disk.
        tables: further tables of the report.
        training_share: how long each model trained, as a share of the paper's training; None if the paper's experiment
            has no training, or there is no such experiment.
    """

    config: Any
    comparisons: Sequence[Check]
    metrics: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    data: Any = None
    tables: Sequence[RecordTable] = field(default_factory=list)
    training_share: float | None = None


@dataclass(frozen=True)
class Record:
    """A result, read from its folder.

    Attributes:
        directory: the folder.
        title: one line that says which claim is reproduced.
        provenance: what made it.
        comparisons: the claims of the paper, compared with our results.
        tables: further tables.
        notes: remarks for the reader, in Markdown.
        figures: {caption: file}; a file may be missing.
        training_share: how long each model trained, as a share of the paper's training; None if that has no meaning.
        run_seconds: seconds of all training and evaluation runs below the folder, over all sessions of each; None
            without runs.
    """

    directory: Path
    title: str
    provenance: Provenance
    comparisons: list[Check]
    tables: list[RecordTable]
    notes: list[str]
    figures: dict[str, Path]
    training_share: float | None = None
    run_seconds: float | None = None

    @property
    def judge(self) -> Judge:
        """Says which claims hold, if the preset tests them."""
        return Judge(self.provenance.preset)

    @property
    def missing_figures(self) -> list[Path]:
        """Figures whose files do not exist."""
        return [path for path in self.figures.values() if not path.is_file()]


def write(directory: Path, outcome: Outcome, provenance: Provenance, title: str, figures: dict[str, Path]) -> Path:
    """Write `config.json`, `metrics.json` and `report.md` next to the figures; return the path of the report."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(outcome.config) if is_dataclass(outcome.config) else outcome.config  # pyright: ignore[reportArgumentType]
    write_text(directory / "config.json", to_json({"preset": provenance.preset, **config}))
    tested = Judge(provenance.preset).tests
    metrics = {
        "title": title,
        "provenance": asdict(provenance),
        "training_share": outcome.training_share,
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
    """Read the result in a folder, also one of an older version.

    Raises:
        ValueError: if the folder holds no valid result; names the file.
    """
    path = directory / "metrics.json"
    try:
        return _record(directory, parse_json(check_inside(path, directory).read_text(encoding="utf-8")))
    except KeyError as error:
        raise ValueError(f"{path}: expected a result of mbd reproduce, got one without {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a result of mbd reproduce, got an error: {error}") from error


def _record(directory: Path, metrics: dict[str, Any]) -> Record:
    made = {"sessions": 0, **metrics["provenance"]}  # older versions did not count them
    provenance = {each.name: made[each.name] for each in fields(Provenance)}
    names = metrics.get("figures")
    if names is None:  # an older version: the file names are all there is to say
        names = {path.stem.replace("_", " "): path.name for path in sorted(directory.glob("*.png"))}
    for name in names.values():
        if Path(name).name != name:
            raise ValueError(f"figures: expected names of files in the same folder, got {name!r}")
        check_inside(directory / name, directory)
    record = Record(
        directory=directory,
        title=str(metrics.get("title") or directory.resolve().name),
        provenance=Provenance(**provenance),
        comparisons=comparisons_of(metrics),
        tables=[RecordTable(**_numbers_for_words(table)) for table in metrics.get("tables", [])],
        notes=[str(note) for note in metrics.get("notes", [])],
        figures={caption: directory / name for caption, name in names.items()},
        training_share=metrics.get("training_share"),
        run_seconds=_run_seconds(directory),
    )
    page.result(record)  # fails here, where the file is known, if something cannot be shown
    return record


def _run_seconds(directory: Path) -> float | None:
    """Add up the seconds of the finished runs in a folder of results."""
    runs = [read_object(check_inside(path, directory)) for path in directory.glob("runs/*/metrics.json")]
    return math.fsum(float(run.get("seconds", 0)) for run in runs) if runs else None


def comparisons_of(metrics: dict[str, Any]) -> list[Check]:
    """Return the comparisons of a `metrics.json`."""
    return [check_of(_numbers_for_words(row)) for row in metrics["comparisons"]]


_INFINITE = ("nan", "inf", "-inf")


def _words_for_infinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by words, so that a run that diverged can be recorded."""
    if isinstance(value, dict):
        return {key: _words_for_infinite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_words_for_infinite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers_for_words(value: Any) -> Any:
    """Undo `_words_for_infinite`."""
    if isinstance(value, dict):
        return {key: _numbers_for_words(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_numbers_for_words(x) for x in value]
    return float(value) if isinstance(value, str) and value in _INFINITE else value
