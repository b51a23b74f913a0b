"""Build a page about results from blocks that are independent of Markdown and HTML."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from membydesign.reports.comparison import NOT_AT_THIS_SIZE, by_claim, failing, numbers, tested

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.reports.comparison import Check, Value
    from membydesign.reports.record import Record, RecordTable
    from membydesign.reports.verdict import Judge, Verdict


@dataclass(frozen=True)
class Mark:
    """A badge: a verdict that is good or bad, or, where `good` is None, a fact such as the preset."""

    good: bool | None
    text: str


@dataclass(frozen=True)
class Link:
    """A link to a heading of the same page."""

    text: str
    anchor: str


@dataclass(frozen=True)
class Code:
    """A command or other code."""

    text: str


TRAINING = "of the paper's training"

Inline = str | Mark | Link | Code
"""A piece of a line; a string is plain text without markup."""


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is that of the page."""

    text: str
    level: int
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A sequence of pieces."""

    parts: Sequence[Inline]


@dataclass(frozen=True)
class Facts:
    """Values by name."""

    items: Mapping[str, Inline]


@dataclass(frozen=True)
class Figure:
    """An image, whose file may be missing."""

    caption: str
    path: Path


@dataclass(frozen=True)
class Note:
    """A remark in Markdown, whose links are relative to `directory`."""

    text: str
    directory: Path


@dataclass(frozen=True)
class Grid:
    """A table; `right` says which columns are right-aligned numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    right: Sequence[bool]
    note: Note | None = None


@dataclass(frozen=True)
class Notes:
    """A list of remarks."""

    items: Sequence[Note]


@dataclass(frozen=True)
class Item:
    """A line of the contents, and the lines below it."""

    parts: Sequence[Inline]
    below: Sequence[Item] = field(default_factory=list)


@dataclass(frozen=True)
class Contents:
    """A table of contents, with links."""

    items: Sequence[Item]


Block = Heading | Paragraph | Facts | Figure | Grid | Notes | Contents


def result(record: Record, *, level: int = 1, anchor: str = "", folder: str = "") -> list[Block]:
    """Build the blocks of one result: verdict, provenance, figures, claims, tables, notes.

    Args:
        record: the result.
        level: the level of its heading.
        anchor: the target of links to it, if there are any.
        folder: its folder, if the page should name it.
    """
    judge = record.judge
    blocks: list[Block] = [Heading(record.title, level, anchor), Paragraph(_badges(record))]
    details = _details(judge, record.comparisons)
    blocks += [Paragraph([details])] if details else []
    blocks.append(_provenance(record, folder))
    blocks += [Figure(caption, path) for caption, path in record.figures.items()]
    for i, (claim, rows) in enumerate(by_claim(record.comparisons).items()):
        too_small = judge.tests and not tested(rows)
        heading = f"{claim} ({NOT_AT_THIS_SIZE})" if too_small else claim
        blocks.append(Heading(heading, level + 1, _claim_anchor(anchor, i)))
        agreeing = judge.agreeing(rows)
        blocks.append(Paragraph([_inline(judge.claim(rows)), f": {agreeing}." if agreeing else "."]))
        blocks.append(_comparisons(judge, rows))
    for table in record.tables:
        blocks += [Heading(table.title, level + 1), _table(table, record.directory)]
    if record.notes:
        blocks += [Heading("Notes", level + 1), Notes([Note(text, record.directory) for text in record.notes])]
    return blocks


def gathered(records: Mapping[str, Record], title: str = "Results beside the paper") -> list[Block]:
    """Build one page of all results: a summary, the contents with every verdict, then each result.

    Args:
        records: the results by folder.
        title: the heading of the page.
    """
    anchors = _anchors(records)
    blocks: list[Block] = [Heading(title, 1), _summary(records, anchors), Heading("Contents", 2)]
    blocks.append(Contents([_item(record, anchors[folder]) for folder, record in records.items()]))
    for folder, record in records.items():
        blocks += result(record, level=2, anchor=anchors[folder], folder=folder)
    return blocks


def _anchors(folders: Mapping[str, Record]) -> dict[str, str]:
    """Return a unique name of letters, digits and hyphens for each folder."""
    anchors: dict[str, str] = {}
    for i, folder in enumerate(folders):
        name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "result"
        anchors[folder] = f"{name}--{i + 1}" if name in anchors.values() else name
    return anchors


def _claim_anchor(anchor: str, index: int) -> str:
    return f"{anchor}--claim-{index + 1}" if anchor else ""


def _summary(records: Mapping[str, Record], anchors: Mapping[str, str]) -> Grid:
    headings = [
        *("result", "preset", TRAINING, "claims held", "comparisons agreeing"),
        *("commit", "seconds, all sessions", "seconds in runs"),
    ]
    rows: list[list[Inline]] = []
    for folder, record in records.items():
        made, checks = record.provenance, tested(record.comparisons)
        lost, claims, agreeing = failing(checks), len(by_claim(checks)), sum(c.agrees for c in checks)
        judged = record.judge.tests and claims
        rows.append(
            [
                Link(folder, anchors[folder]),
                made.preset,
                share(record.training_share) or "—",
                Mark(not lost, f"{claims - len(lost)}/{claims}") if judged else "—",
                Mark(not lost, f"{agreeing}/{len(checks)}") if judged else "—",
                _short(made.commit),
                _seconds(record),
                f"{record.run_seconds:,.0f}" if record.run_seconds is not None else "—",
            ]
        )
    note = (
        "Seconds in runs: training and evaluation, summed over all runs and all sessions of each; runs may have shared "
        "a machine. At least (≥): an older result, which recorded its last session alone."
    )
    return Grid(headings, rows, [False, False, True, True, True, False, True, True], Note(note, Path()))


def _seconds(record: Record) -> str:
    made = record.provenance
    return f"{'' if _all_sessions(record) else '≥ '}{made.seconds:,.{0 if made.seconds >= 100 else 2}f}"


def _all_sessions(record: Record) -> bool:
    """Whether the seconds of a result are those of all sessions: recorded, or there was nothing to resume."""
    return bool(record.provenance.sessions) or record.run_seconds is None


def share(training: float | None) -> str:
    """Return a share of the paper's training in per cent; empty if there is none."""
    if training is None:
        return ""
    return f"{100 * training:.2g} %" if training < 0.995 else f"{100 * training:.0f} %"


def _short(commit: str) -> str:
    """Return twelve digits of a commit, and whether the source differed from it."""
    name, changed, _ = commit.partition(" (")
    return name[:12] + (" (changed)" if changed else "")


def _item(record: Record, anchor: str) -> Item:
    below = [
        Item([Link(claim, _claim_anchor(anchor, i)), " — ", _inline(record.judge.claim(rows))])
        for i, (claim, rows) in enumerate(by_claim(record.comparisons).items())
    ]
    return Item([Link(record.title, anchor), " — ", *_badges(record)], below)


def _inline(verdict: Verdict) -> Inline:
    return Mark(verdict.good, verdict.text) if verdict.text else ""


def _badges(record: Record) -> list[Inline]:
    """The preset, the share of the paper's training and the verdict, in the same order for every result."""
    of_paper = share(record.training_share)
    badges = [Mark(None, f"{record.provenance.preset} preset")]
    badges += [Mark(None, f"{of_paper} {TRAINING}")] if of_paper else []
    verdict = record.judge.claims(record.comparisons, names=False)
    badges.append(Mark(verdict.good, verdict.text))
    separated: list[Inline] = [part for badge in badges for part in (" · ", badge)]
    return separated[1:]


def _details(judge: Judge, comparisons: Sequence[Check]) -> str:
    """Which claims do not hold, how many comparisons agree, and what that is worth; empty if nothing was compared."""
    agreeing = judge.agreeing(comparisons)
    sentences = [judge.exceptions(comparisons), f"{agreeing} with the paper." if agreeing else ""]
    return " ".join(filter(None, [*sentences, judge.settings if comparisons else ""]))


def _provenance(record: Record, folder: str) -> Facts:
    made = record.provenance
    items: dict[str, Inline] = {"folder": folder} if folder else {}
    items |= {
        "command": Code(made.command),
        "commit": made.commit,
        "date": made.date,
        "seconds": _sessions(record),
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
    }
    return Facts(items)


def _sessions(record: Record) -> str:
    """Say how long it took: all sessions of the command, and all of its runs."""
    count, seconds = record.provenance.sessions, _seconds(record)
    if not _all_sessions(record):
        told = f"{seconds.removeprefix('≥ ')} in the last session"
    else:
        told = seconds if count < 2 else f"{seconds} in {count} sessions"
    if record.run_seconds is None:
        return told
    return f"{told}; {record.run_seconds:,.0f} in all runs and their sessions"


def _comparisons(judge: Judge, comparisons: Sequence[Check]) -> Grid:
    headings = ["quantity", "paper", "ours", "tolerance"]
    rows: list[list[Inline]] = [[c.quantity, *c.shown()] for c in comparisons]
    if judge.tests:
        headings.append("agrees")
        rows = [[*row, _inline(judge.row(c))] for row, c in zip(rows, comparisons, strict=True)]
    return Grid(headings, rows, [False] * len(headings))


def _table(table: RecordTable, directory: Path) -> Grid:
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.headings)
    right = [bool(column) and not any(isinstance(cell, str) for cell in column) for column in columns]
    note = Note(table.note, directory) if table.note else None
    return Grid(table.headings, [[_cell(cell) for cell in row] for row in table.rows], right, note)


def _cell(value: Value) -> str:
    return numbers([value])[0] if isinstance(value, float) else str(value)
