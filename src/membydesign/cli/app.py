"""`mbd`: its commands, those that are short in full, and those of other modules."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer looks at it
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from membydesign import __version__
from membydesign.cli.bench import page
from membydesign.cli.bench.problem import Size
from membydesign.cli.bench.sections import SECTIONS, check_device, chosen
from membydesign.cli.bench.timing import Settings, interleaved, product, product_rate
from membydesign.cli.catalogue_page import catalogue_page
from membydesign.cli.convert import convert
from membydesign.cli.evaluate import evaluate
from membydesign.cli.generate import generate
from membydesign.cli.group import StoppableGroup
from membydesign.cli.kernels.command import kernels
from membydesign.cli.report import report
from membydesign.cli.reproduce import reproduce
from membydesign.cli.say import AsJson, console, fail
from membydesign.design import catalogue, state_formula
from membydesign.experiments import record
from membydesign.files import to_json

app = typer.Typer(
    cls=StoppableGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

app.command()(convert)
app.command()(generate)
app.command()(reproduce)
app.command()(report)
app.add_typer(evaluate, name="evaluate")
app.add_typer(kernels, name="kernels")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Memory by Design: state what a memory assumes, get its exact Bayesian filter.

    Start with `mbd zoo`, the catalogue of designs, and `mbd reproduce collision`, the paper's claims checked.
    """
    if show:
        print(f"memory-by-design {__version__}")
        raise typer.Exit


@app.command()
def zoo(
    name: Annotated[str | None, typer.Argument(help="A design to describe in full, for example `kda`.")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="With a name: its equations as LaTeX.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Every design as one Markdown page.")] = False,
    as_json: AsJson = False,
) -> None:
    """Table 1 as a table: every design, what it assumes, how exact it is, and how large its state is."""
    if name is not None:
        if markdown:
            raise fail("--markdown is the page of every design: leave the name away")
        if name not in catalogue:
            raise fail(f"no design named {name!r}; there are {', '.join(catalogue)}")
        description = catalogue[name].describe()
        if as_json:
            print(to_json(_facts(name)), end="")
        else:
            print(description.latex if latex else description.text)
        return
    if latex:
        raise fail("--latex needs the name of a design, for example: mbd zoo kda --latex")
    if as_json:
        print(to_json([_facts(name) for name in catalogue]), end="")
        return
    if markdown:
        print(catalogue_page(), end="")
        return
    table = Table(title="The catalogue: Table 1 and the ablations", title_justify="left", caption_justify="left")
    for heading in ("name", "memory drifts", "a write observes", "covariance", "exactness", "state per head"):
        table.add_column(heading, no_wrap=heading == "name", overflow="fold")
    for name, design in catalogue.items():
        parts = (type(part).__name__ for part in (design.transition, design.write, design.covariance))
        table.add_row(name, *parts, design.exactness, state_formula(design))
    table.caption = "D key size, M value size.  mbd zoo NAME shows the equations of one."
    console().print(table)


def _facts(name: str) -> dict[str, Any]:
    design = catalogue[name]
    return {
        "name": name,
        "title": design.title,
        "transition": type(design.transition).__name__,
        "write": type(design.write).__name__,
        "covariance": type(design.covariance).__name__,
        "exactness": design.exactness,
        "state": state_formula(design),
        "cost_per_token": design.cost_order,
        "step_parameters": [asdict(parameter) for parameter in design.step_parameters],
        "latex": design.describe().latex,
        "note": design.note,
        "citation": design.citation,
    }


@app.command()
def bench(
    size: Annotated[
        list[str] | None, typer.Option(help="B,H,T,D (may be given several times). Default: each section's own grid.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed in turn; the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch. Default: its own.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: beside flash-linear-attention's kernels where it is installed.")
    ] = "cpu",
    naive: Annotated[
        bool, typer.Option("--naive", help="Time the loop over tokens, which is slow, at all sizes.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Sections to run: {', '.join(SECTIONS)}; several with commas.")
    ] = None,
    choices: Annotated[bool, typer.Option("--choices", help="Short for --only choices.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write results.json and results.md to this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Speed and memory on this machine, as ratios of things that are measured in turn in one run.

    - **speed**: forward, forward+backward and one decoding step beside Transformers' own CPU code for the same rule
    - **models**: whole models, training and decoding, beside Transformers' Gated DeltaNet model
    - **steps**: a training step of learned recall and of MQAR beside the same models with Transformers' Gated DeltaNet
    - **transitions**: the Bayesian Layer with a decay of each row, and with rotations, beside one decay
    - **growth**: time for each token at 32 times the length
    - **generation**: answers to needles in haystacks, with the cache and reading the whole text for every token
    - **memory**: peak memory of the same tasks, each in a process of its own
    - **rate**: useful operations a second, beside the machine's own matrix products
    - **accuracy**: how far float32 is from float64 on streams that are hard, beside the loop over tokens
    - **text**: tokens a second of packing text, counting its pairs and labelling AR-hits
    - **choices**: every backend and chunk size, from which the defaults are chosen

    All of it takes about half an hour; `mbd bench --only speed --size 1,4,2048,64` takes a minute.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        check_device(device)
        names = chosen([*(only or ()), *(["choices"] if choices else [])], device)
        settings = Settings(tuple(map(Size.parse, size or ())), rounds, naive, device)
        jobs = [job for name in names for job in SECTIONS[name].jobs(settings)]
    except ValueError as error:
        raise fail(str(error)) from None
    if out is not None and out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    peer, package = ("Transformers", "transformers") if device == "cpu" else ("flash-linear-attention", "fla-core")
    if page.version_of(package) is None and {"speed", "memory"} & set(names):
        note = f"{peer} is not installed: ours alone, without ratios to it (pip install {package})."
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
    made = record.Provenance.now("bench", ",".join(names), time.perf_counter() - started)
    results = page.Results(made, rate, rows, device)
    if out is not None:
        results.write(out)
    if as_json:
        print(to_json(results.as_dict()), end="")
        return
    for title, each in results.pages():
        console().print(f"[bold underline]{escape(title)}[/]\n")
        for name, lines in each.groups.items():
            console().print(f"[bold]{escape(name)}[/bold]", highlight=False)
            table = Table(box=None, pad_edge=False)
            for heading in each.headings:
                table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
            for cells in lines:
                table.add_row(*cells)
            console().print(table, "")
    console().print(results.machine(), highlight=False)


if __name__ == "__main__":
    sys.exit(app())
