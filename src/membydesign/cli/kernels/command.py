"""`mbd kernels check`: the GPU kernels, checked as far as that goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from membydesign.cli.kernels import compiled, distances
from membydesign.cli.say import AsJson, console, fail
from membydesign.cli.tables import Column, Group, show_table
from membydesign.files import to_json
from membydesign.install import install_hint
from membydesign.ops.kalman import triton_support

if TYPE_CHECKING:
    from collections.abc import Generator

kernels = typer.Typer(no_args_is_help=True, help="The Triton kernels for GPUs.")


@kernels.callback()
def _group() -> None:
    """The Triton kernels for GPUs."""


@kernels.command()
def check(
    targets: Annotated[
        str | None,
        typer.Option(help=f"What to compile for, of {', '.join(compiled.TARGETS)}. Default: all that can be."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help=f"Key sizes, of {', '.join(map(str, compiled.SIZES))}. Default: all.")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help=f"Of each kernel, some of {', '.join(compiled.VARIANTS)}. Default: all.")
    ] = None,
    run: Annotated[bool, typer.Option(help="Run the kernels in the interpreter.")] = True,
    compile: Annotated[bool, typer.Option(help="Compile the kernels.")] = True,
    as_json: AsJson = False,
) -> None:
    """Every kernel in Triton's interpreter beside the naive filter, then compiled for real GPUs; needs none.

    Exits with 1 if a distance is beyond its table, if a kernel does not compile, if a block would need more shared
    memory than its GPU has, or if registers spill in every layout at D ≤ 64 on NVIDIA's GPUs. Nothing is timed: that
    takes a GPU.
    """
    if not triton_support.installed():
        oldest = ".".join(map(str, triton_support.OLDEST))
        raise fail(f"mbd kernels needs Triton {oldest} or newer: {install_hint('triton')}")
    if compile and os.environ.get("TRITON_INTERPRET") == "1":
        raise fail("TRITON_INTERPRET=1 is set, with which Triton compiles nothing: unset it, or say --no-compile")
    names = _chosen("targets", targets, compiled.targets())
    chosen = tuple(map(int, _chosen("sizes", sizes, tuple(map(str, compiled.SIZES)))))
    which = _chosen("variants", variants, tuple(compiled.VARIANTS))
    jobs = list(compiled.jobs(names, chosen, which)) if compile else []
    runs, found = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        rows = 2 * len(distances.DESIGNS) * len(chosen) if run else 0
        task = progress.add_task("in the interpreter", total=rows + len(jobs))
        for row in _interpreted(chosen) if run else ():
            runs.append(row)
            progress.update(task, advance=1, description=f"in the interpreter, D = {row['D']}")
        for job in jobs:
            progress.update(task, description=job.title)
            found.append(compiled.compiled(job))
            progress.advance(task)
    complaints = compiled.complaints(found)
    complaints += [
        f"{r['kernel']}, {r['design']}, D = {r['D']}: too far from the loop" for r in runs if r["of_allowed"] > 1
    ]
    if as_json:
        rows = [x.as_dict() for x in found]
        version = triton_support.version()
        print(to_json({"triton": version, "distances": runs, "compiled": rows, "complaints": complaints}), end="")
    else:
        _show(runs, found)
        for complaint in complaints:
            console().print(f"[red]{escape(complaint)}[/]", highlight=False, soft_wrap=True)
    if complaints:
        raise typer.Exit(1)


def _chosen(option: str, given: str | None, there: tuple[str, ...]) -> tuple[str, ...]:
    wanted = there if given is None else tuple(part.strip() for part in given.split(","))
    if unknown := set(wanted) - set(there):
        raise fail(f"--{option}: expected some of {', '.join(there)}, got {', '.join(sorted(unknown))}")
    return wanted


def _interpreted(sizes: tuple[int, ...]) -> Generator[dict[str, Any], None, None]:
    """Rows of `distances`, from a process that was told to interpret before it imported Triton."""
    command = [sys.executable, "-W", "ignore", "-m", "membydesign.cli.kernels.distances", *map(str, sizes)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
            _, said = process.communicate()
        finally:  # it has ended, unless this was interrupted
            process.kill()
    if process.returncode:
        raise fail(f"the kernels did not run in the interpreter: {said.strip().splitlines()[-1]}")


def _show(runs: list[dict[str, Any]], found: list[compiled.Compiled]) -> None:
    if runs:
        quantities = list(distances.MOST)
        rows: list[list[str]] = []
        for row in runs:
            cells = (f"{row[what]:.0e}" if what in row else "" for what in quantities)
            rows.append([row["kernel"], row["design"], str(row["D"]), *cells])
        rows.append(["allowed", "", "", *(f"{distances.MOST[what]:.0e}" for what in quantities)])
        columns = [Column("kernel"), Column("design"), *(Column(heading, right=True) for heading in ("D", *quantities))]
        show_table(columns, [Group(rows)], title="float32 kernels in the interpreter, distance from the float64 loop")
    if found:
        title = f"Compiled by Triton {triton_support.version()}, with as many value columns as rows; bytes"
        headings = ("target", "kernel", "D", "variant", "panel", "columns", "warps", "registers", "spills", "shared")
        columns = [
            Column(heading, right=heading not in ("target", "kernel", "variant"))
            for heading in (*headings, "occupancy")
        ]
        lines: list[list[Text]] = []
        for x in found:
            tiles = (str(n) if n else "all" for n in (x.job.tiles.panel, x.job.tiles.columns, x.job.tiles.warps))
            counts = ("failed", "", "") if x.failure else (str(n) for n in (x.registers, x.spills, x.shared))
            where = (x.job.target, x.job.kernel, str(x.job.D), x.job.variant)
            style = "red" if x.complaint else ""
            lines.append([Text(cell, style) for cell in (*where, *tiles, *counts, f"{x.occupancy:.0%}")])
        show_table(columns, [Group(lines)], title=title)
