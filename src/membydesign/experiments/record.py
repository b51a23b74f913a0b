"""What a run found, beside what the paper printed, with the command, preset and commit that made it."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import membydesign

Value = float | int | str


@dataclass(frozen=True)
class Comparison:
    """One number of the paper beside ours.

    Attributes:
        claim: what the paper claims, in a few words; comparisons of one claim stand together.
        quantity: which number it is.
        paper: the paper's value: a number, or a word such as "never".
        ours: our value.
        tolerance: how far apart two numbers may be and still agree; words must be equal.
    """

    claim: str
    quantity: str
    paper: Value
    ours: Value
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether ours is within the tolerance of the paper's."""
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return self.paper == self.ours
        return abs(self.ours - self.paper) <= self.tolerance

    def as_dict(self) -> dict[str, Value | bool]:
        """The form in which `metrics.json` holds it."""
        return {**asdict(self), "agrees": self.agrees}


def printed(claim: str, quantity: str, paper: str, ours: float, *, rounded_twice: bool = False) -> Comparison:
    """Compare with a number as the paper prints it: ours must round to the same digits.

    Args:
        claim: what the paper claims.
        quantity: which number it is.
        paper: the digits as printed; half a unit of the last one is the tolerance.
        ours: our value.
        rounded_twice: for a row whose printed digit comes out only if it was rounded in two steps (−0.3448 → −0.345 →
            −0.35). It is marked as such, and its tolerance is 0.55 of a unit.
    """
    unit = 10.0 ** -len(paper.partition(".")[2])
    if rounded_twice:
        return Comparison(claim, f"{quantity} (paper rounded twice)", float(paper), ours, 0.55 * unit)
    return Comparison(claim, quantity, float(paper), ours, 0.5 * unit)


@dataclass(frozen=True)
class Outcome:
    """What `run` of an experiment returns.

    Attributes:
        config: the settings, a frozen dataclass.
        comparisons: every number of the paper that was checked.
        metrics: everything else worth keeping, as plain numbers, lists and dictionaries.
        notes: what a reader should know, one sentence or two each, in Markdown.
        data: what the figures need; not written to disk.
    """

    config: Any
    comparisons: list[Comparison]
    metrics: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    data: Any = None


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
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            commit=_commit(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(seconds, 2),
            versions={
                "membydesign": membydesign.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
            },
        )


def _commit() -> str:
    """The commit of the source, marked if the package differs from it; "unknown" outside a checkout."""
    package = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", __file__)
        changed = git("status", "--porcelain", "--", str(package))
        return (git("rev-parse", "HEAD") + (" (with uncommitted changes)" if changed else "")) if tracked else "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(directory: Path, outcome: Outcome, provenance: Provenance, title: str, figures: dict[str, Path]) -> Path:
    """Write `config.json`, `metrics.json` and `report.md` beside the figures; returns the report."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(outcome.config) if is_dataclass(outcome.config) else outcome.config  # pyright: ignore[reportArgumentType]
    write_text(directory / "config.json", to_json({"preset": provenance.preset, **config}))
    metrics = {
        "provenance": asdict(provenance),
        "comparisons": [c.as_dict() for c in outcome.comparisons],
        "metrics": outcome.metrics,
    }
    write_text(directory / "metrics.json", to_json(metrics))
    report = directory / "report.md"
    write_text(report, _report(outcome, provenance, title, figures))
    return report


def to_json(value: Any) -> str:
    """JSON as every command and file of this package writes it."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def shown(comparison: Comparison) -> tuple[str, str, str]:
    """(paper, ours, tolerance) as tables show them: the paper's digits as printed, three more of ours."""
    c = comparison
    if isinstance(c.paper, str) or isinstance(c.ours, str) or not c.tolerance:
        return str(c.paper), str(c.ours), "exact"
    decimals = math.floor(-math.log10(c.tolerance))
    return f"{c.paper:.{decimals}f}", f"{c.ours:.{decimals + 3}f}", f"{c.tolerance:.2g}"


def by_claim(comparisons: list[Comparison]) -> dict[str, list[Comparison]]:
    """The comparisons under the claims they belong to, in their order."""
    claims: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        claims.setdefault(comparison.claim, []).append(comparison)
    return claims


def comparisons_of(metrics: dict[str, Any]) -> list[Comparison]:
    """The comparisons that a `metrics.json` holds."""
    fields = ("claim", "quantity", "paper", "ours", "tolerance")
    return [Comparison(**{name: row[name] for name in fields}) for row in metrics["comparisons"]]


def verdict(comparisons: list[Comparison]) -> str:
    """How many agree, in words."""
    agreeing = sum(c.agrees for c in comparisons)
    return f"{agreeing} of {len(comparisons)} comparisons agree"


def _report(outcome: Outcome, provenance: Provenance, title: str, figures: dict[str, Path]) -> str:
    lines = [f"# {title}", "", f"**{verdict(outcome.comparisons)}** with the paper's printed values.", ""]
    lines += [f"- command: `{provenance.command}`", f"- preset: {provenance.preset}", f"- commit: {provenance.commit}"]
    lines += [f"- made on {provenance.date} in {provenance.seconds} s with {_listed(provenance.versions)}", ""]
    for caption, path in figures.items():
        lines += [f"![{caption}]({path.name})", "", f"*{caption}*", ""]
    for claim, comparisons in by_claim(outcome.comparisons).items():
        lines += [f"## {claim}", "", "| quantity | paper | ours | tolerance | agrees |", "|---|---|---|---|---|"]
        lines += [
            f"| {_cell(c.quantity)} | {' | '.join(shown(c))} | {'yes' if c.agrees else 'NO'} |" for c in comparisons
        ]
        lines.append("")
    if outcome.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in outcome.notes), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
