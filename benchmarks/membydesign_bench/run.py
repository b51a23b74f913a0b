"""Run sections of the benchmark and show or write what they measured; `mbd bench` calls this."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from membydesign.cli.output import console, fail
from membydesign.cli.tables import Column, Group, show_table
from membydesign.files import to_json
from membydesign.reports import record
from membydesign_bench import child, cpu_peers, page
from membydesign_bench.problem import Size
from membydesign_bench.sections import SECTIONS, check_device, chosen
from membydesign_bench.timing import Settings, interleaved, product, product_rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CHANGED = " (with uncommitted changes)"


def run(
    only: Sequence[str] = (),
    *,
    sizes: Sequence[str] = (),
    rounds: int = 5,
    threads: int | None = None,
    device: str = "cpu",
    naive: bool = False,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure the sections named in `only`, or all; the arguments are the options of `mbd bench`."""
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        check_device(device)
        names = chosen(only, device)
        settings = Settings(tuple(map(Size.parse, sizes)), rounds, naive, device)
        jobs = [job for name in names for job in SECTIONS[name].jobs(settings)]
    except ValueError as error:
        raise fail(str(error)) from None
    if out is not None and out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    peer, package = ("Transformers", "transformers") if device == "cpu" else ("flash-linear-attention", "fla-core")
    if page.version_of(package) is None and {"speed", "memory"} & set(names):
        note = f"{peer} is not installed: ours alone, without ratios to it (pip install {package})."
        Console(stderr=True, soft_wrap=True).print(note, highlight=False)
    for note in cpu_peers.missing() if "peers" in names else ():
        Console(stderr=True, soft_wrap=True).print(note, highlight=False)
    started, rows = time.perf_counter(), []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.title)
            rows += job.run()
            progress.advance(task)
    rate = product_rate(interleaved({"product": product(device)}, rounds, device)["product"])
    provenance = record.Provenance.now("bench", ",".join(names), time.perf_counter() - started)
    results = page.Results(_with_own_changes(provenance), rate, rows, device)
    if out is not None:
        results.write(out)
    if as_json:
        print(to_json(results.as_dict()), end="")
        return
    for title, each in results.pages():
        first, *others = each.headings
        columns = [Column(first), *(Column(heading, right=True) for heading in others)]
        groups = [Group(lines, Text(name, "bold")) for name, lines in each.groups.items()]
        show_table(columns, groups, title=title)
        console().print()
    console().print(results.machine(), highlight=False)


def _with_own_changes(provenance: record.Provenance) -> record.Provenance:
    """Mark the commit as changed if the benchmark itself differs from it; `record` looks at the package alone."""
    if provenance.commit == "unknown" or provenance.commit.endswith(CHANGED):
        return provenance
    status = ("git", "status", "--porcelain", "--", "membydesign_bench")
    changed = subprocess.run(status, cwd=child.FOLDER, capture_output=True, text=True, check=False).stdout
    return replace(provenance, commit=provenance.commit + CHANGED) if changed.strip() else provenance
