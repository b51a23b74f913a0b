"""`mbd bench`: speed and memory on this machine."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 - typer looks at it
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from membydesign.cli.bench import page
from membydesign.cli.bench.problem import Size
from membydesign.cli.bench.sections import SECTIONS, check_device, chosen
from membydesign.cli.bench.timing import Settings, interleaved, product, product_rate
from membydesign.cli.completion import sections
from membydesign.cli.say import AsJson, console, fail
from membydesign.cli.tables import Column, Group, show_table
from membydesign.experiments import record
from membydesign.files import to_json


def bench(
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="B,H,T,D", help="Batch, heads, time and key size; repeatable. Default: the section's."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Timing rounds; the median is reported.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="PyTorch threads. Default: its own.")] = None,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="cpu, or cuda, which compares with flash-linear-attention if installed."),
    ] = "cpu",
    naive: Annotated[
        bool, typer.Option("--naive", metavar="", help="Also time the loop over tokens, which is slow, at all sizes.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"Sections to run, separated by commas: {', '.join(SECTIONS)}. Default: all.",
            autocompletion=sections,
        ),
    ] = None,
    choices: Annotated[bool, typer.Option("--choices", metavar="", help="Short for --only choices.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write results.json and results.md here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory on this machine, compared with other code.

    For example: `mbd bench --only speed --size 1,4,2048,64`, which takes a minute. Everything takes half an hour.

    What is compared is timed in turn, in the same run:

    - **speed**: forward, forward+backward and one decoding step, compared with Transformers' CPU code for the same rule
    - **models**: whole models, training and decoding, compared with Transformers' Gated DeltaNet model
    - **steps**: a training step of recall and of MQAR, compared with the same models on Transformers' Gated DeltaNet
    - **transitions**: the Bayesian Layer with a decay per row, and with rotations, compared with a single decay
    - **growth**: time per token at 32 times the length
    - **generation**: answers to needles in haystacks, with the cache and without it
    - **memory**: peak memory of the same tasks, each in a separate process
    - **rate**: useful operations per second, compared with the machine's matrix products
    - **accuracy**: distance of float32 from float64 on hard streams, compared with the loop over tokens
    - **text**: tokens per second of packing text, counting its pairs and labelling AR-hits
    - **choices**: every backend and chunk size, from which the defaults are chosen
    """
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
        first, *others = each.headings
        columns = [Column(first), *(Column(heading, right=True) for heading in others)]
        groups = [Group(lines, Text(name, "bold")) for name, lines in each.groups.items()]
        show_table(columns, groups, title=title)
        console().print()
    console().print(results.machine(), highlight=False)
