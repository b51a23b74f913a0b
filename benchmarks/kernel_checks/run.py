"""Check the GPU kernels as far as is possible without a GPU; `mbd kernels check` calls this."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from kernel_checks import compiled, distances
from membydesign.cli.output import console, fail
from membydesign.cli.tables import Column, Group, show_table
from membydesign.files import to_json
from membydesign.filter.triton import support as triton_support
from membydesign.install import install_hint
from membydesign_bench import child

if TYPE_CHECKING:
    from collections.abc import Generator


def run_checks(
    targets: str | None = None,
    sizes: str | None = None,
    variants: str | None = None,
    *,
    run: bool = True,
    compile: bool = True,
    as_json: bool = False,
) -> None:
    """Run the kernels in the interpreter and compile them; the arguments are the options of `mbd kernels check`."""
    if not triton_support.installed():
        oldest = ".".join(map(str, triton_support.OLDEST))
        raise fail(f"mbd kernels needs Triton {oldest} or newer: {install_hint('triton')}")
    if compile and os.environ.get("TRITON_INTERPRET") == "1":
        raise fail("TRITON_INTERPRET=1 is set, with which Triton compiles nothing: unset it, or pass --no-compile")
    names = _chosen("targets", targets, compiled.targets())
    chosen = tuple(map(int, _chosen("sizes", sizes, tuple(map(str, compiled.SIZES)))))
    which = _chosen("variants", variants, tuple(compiled.VARIANTS))
    jobs = list(compiled.jobs(names, chosen, which)) if compile else []
    runs, results = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        rows = 2 * len(distances.DESIGNS) * len(chosen) if run else 0
        task = progress.add_task("in the interpreter", total=rows + len(jobs))
        for row in _interpreted(chosen) if run else ():
            runs.append(row)
            progress.update(task, advance=1, description=f"in the interpreter, D = {row['D']}")
        for job in jobs:
            progress.update(task, description=job.title)
            results.append(compiled.compiled(job))
            progress.advance(task)
    complaints = compiled.complaints(results)
    complaints += [
        f"{r['kernel']}, {r['design']}, D = {r['D']}: too far from the loop" for r in runs if r["of_allowed"] > 1
    ]
    if as_json:
        rows = [x.as_dict() for x in results]
        version = triton_support.version()
        print(to_json({"triton": version, "distances": runs, "compiled": rows, "complaints": complaints}), end="")
    else:
        _show(runs, results)
        for complaint in complaints:
            console().print(f"[red]{escape(complaint)}[/]", highlight=False, soft_wrap=True)
    if complaints:
        raise typer.Exit(1)


def _chosen(option: str, names: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    selected = known if names is None else tuple(part.strip() for part in names.split(","))
    if unknown := set(selected) - set(known):
        raise fail(f"--{option}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return selected


def _interpreted(sizes: tuple[int, ...]) -> Generator[dict[str, Any], None, None]:
    """Yield the rows of `distances` from a process that chooses the interpreter before it imports Triton."""
    command = child.command(distances.__name__, *sizes)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **child.options(TRITON_INTERPRET="1")) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
            _, said = process.communicate()
        finally:  # a no-op unless interrupted
            process.kill()
    if process.returncode:
        raise fail(f"the kernels did not run in the interpreter: {said.strip().splitlines()[-1]}")


def _show(runs: list[dict[str, Any]], results: list[compiled.Compiled]) -> None:
    if runs:
        quantities = list(distances.MOST)
        rows: list[list[str]] = []
        for row in runs:
            cells = (f"{row[what]:.0e}" if what in row else "" for what in quantities)
            rows.append([row["kernel"], row["design"], str(row["D"]), *cells])
        rows.append(["allowed", "", "", *(f"{distances.MOST[what]:.0e}" for what in quantities)])
        columns = [Column("kernel"), Column("design"), *(Column(heading, right=True) for heading in ("D", *quantities))]
        show_table(columns, [Group(rows)], title="float32 kernels in the interpreter, distance from the float64 loop")
    if results:
        title = f"Compiled by Triton {triton_support.version()}, with as many value columns as rows; bytes"
        headings = ("target", "kernel", "D", "variant", "panel", "columns", "warps", "registers", "spills", "shared")
        columns = [
            Column(heading, right=heading not in ("target", "kernel", "variant"))
            for heading in (*headings, "occupancy")
        ]
        lines: list[list[Text]] = []
        for x in results:
            tiles = (str(n) if n else "all" for n in (x.job.tiles.panel, x.job.tiles.columns, x.job.tiles.warps))
            counts = ("failed", "", "") if x.failure else (str(n) for n in (x.registers, x.spills, x.shared))
            where = (x.job.target, x.job.kernel, str(x.job.D), x.job.variant)
            style = "red" if x.complaint else ""
            lines.append([Text(cell, style) for cell in (*where, *tiles, *counts, f"{x.occupancy:.0%}")])
        show_table(columns, [Group(lines)], title=title)
