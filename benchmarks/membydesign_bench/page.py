"""What was measured, as tables for people and as JSON for machines, with the machine and commit that it comes from."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.files import to_json, write_text
from membydesign_bench.sections import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from membydesign.reports import record
    from membydesign_bench.timing import Row


class Page(NamedTuple):
    """The table of one section: lines of cells, in groups that have a name."""

    headings: Sequence[str]
    groups: dict[str, list[list[str]]]


@dataclass(frozen=True)
class Results:
    """Everything that one `mbd bench` measured."""

    provenance: record.Provenance
    product_gflops: float
    rows: list[Row]
    device: str = "cpu"

    def as_dict(self) -> dict[str, Any]:
        """The form of `results.json`; without a date, so that what changes in it are results."""
        made = asdict(self.provenance)
        del made["date"]
        machine = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "matrix_product_gflops": self.product_gflops}
        made["versions"]["transformers"] = version_of("transformers")
        if self.device != "cpu":
            machine["gpu"] = torch.cuda.get_device_name()
            made["versions"] |= {name: version_of(name) for name in ("fla-core", "triton")}
        return {
            "provenance": made,
            "machine": machine,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
        }

    def machine(self) -> str:
        """The machine in a sentence."""
        threads = torch.get_num_threads()
        counted = f"{threads} thread{'' if threads == 1 else 's'}"
        name = f"{cpu_name()}, {counted}" if self.device == "cpu" else torch.cuda.get_device_name()
        return f"{name}; matrix products run at {self.product_gflops:.0f} GFLOP/s here."

    def pages(self) -> Iterator[tuple[str, Page]]:
        """The title and table of each section that was run."""
        for name, section in SECTIONS.items():
            rows = [row for row in self.rows if row.section == name]
            if rows:
                yield section.title, PAGES.get(name, _side_by_side)(rows)

    def markdown(self) -> str:
        """The form of `results.md`."""
        made = self.as_dict()["provenance"]
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
        lines = ["# Benchmark", "", self.machine(), ""]
        lines += [f"- command: `{made['command']}`", f"- commit: {made['commit']}", f"- made with {versions}", ""]
        for title, page in self.pages():
            lines += [f"## {title}", "", _line(["", *page.headings]), _line(["---", *("---:" for _ in page.headings)])]
            lines += [_line([name, *cells]) for name, group in page.groups.items() for cells in group]
            lines.append("")
        return "\n".join(lines)

    def write(self, directory: Path) -> None:
        """Write `results.json` and `results.md`."""
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "results.json", to_json(self.as_dict()))
        write_text(directory / "results.md", self.markdown())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _side_by_side(rows: list[Row], size: str = "B,H,T,D") -> Page:
    """A group for each pair that is compared, a line for each size."""
    groups: dict[str, list[list[str]]] = {}
    for r in rows:
        name = f"{r.task}: {r.what}" + (f" / {r.against}" if r.against else "")
        groups.setdefault(name, []).append([r.size, number(r.value), number(r.reference), number(r.ratio)])
    unit = rows[0].unit
    return Page((size, f"first, {unit}", f"second, {unit}", "ratio"), groups)


def _all_methods(rows: list[Row]) -> Page:
    """A group for each task, a line for each size, a column for each method."""
    methods = list(dict.fromkeys(row.what for row in rows))
    sizes: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        line = sizes.setdefault(r.task, {}).setdefault(r.size, [r.size, r.against, number(r.reference)])
        line.append(number(r.ratio))
    groups = {task: list(lines.values()) for task, lines in sizes.items()}
    return Page(("B,H,T,D", "fastest", "ms", *methods), groups)


def _values(rows: list[Row]) -> Page:
    """A group for each size, a line for each task, a column for the reference and each method."""
    methods = list(dict.fromkeys(row.what for row in rows))
    sizes: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        sizes.setdefault(r.size, {}).setdefault(r.task, [r.task, number(r.reference)]).append(number(r.value))
    groups = {size: list(lines.values()) for size, lines in sizes.items()}
    return Page(("", rows[0].against, *methods), groups)


PAGES = {"choices": _all_methods, "accuracy": _values, "text": partial(_side_by_side, size="tokens")}
"""The sections whose tables are not pairs side by side at sizes B,H,T,D."""


def number(x: float | None) -> str:
    """Three digits or so."""
    if x is None:
        return "—"
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """What the CPU calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
