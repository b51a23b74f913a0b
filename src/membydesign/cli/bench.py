"""`mbd bench`: measure speed and memory on this machine, with the benchmarks of a checkout."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer

from membydesign.cli.completion import sections
from membydesign.cli.output import AsJson  # noqa: TC001 - typer reads it
from membydesign.cli.requirements import need_benchmarks


def bench(
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="B,H,T,D", help="Batch, heads, time and key size; repeatable. Default: the section's."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Timing rounds; the median is reported.")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="PyTorch threads. Default: PyTorch's own choice.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="cpu, or cuda, which compares with flash-linear-attention if installed."),
    ] = "cpu",
    naive: Annotated[
        bool, typer.Option("--naive", metavar="", help="Also time the slow loop over tokens at all sizes.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES", help="Sections to run, separated by commas. Default: all.", autocompletion=sections
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

    Runs from a checkout, since benchmarks are not part of the installed package. What is compared is timed in turn, in
    the same run:

    - **speed**: forward, forward+backward and one decoding step, compared with Transformers' CPU code for the same rule
    - **models**: whole models, training and decoding, compared with Transformers' Gated DeltaNet model
    - **accelerate**: Transformers models with our kernels under their layers, compared with the same models as they are
    - **steps**: a training step of recall and of MQAR, compared with the same models on Transformers' Gated DeltaNet
    - **transitions**: the Bayesian Layer with a decay per row, and with rotations, compared with a single decay
    - **designs**: every design of the catalogue with a kernel, compared with the one that it extends
    - **growth**: time per token at 32 times the length
    - **peers**: forward and a decoding step, compared with ONNX Runtime's and vLLM's CPU kernels, where installed
    - **generation**: answers to needles in haystacks, with the cache and without it
    - **memory**: peak memory of the same tasks, each in a separate process
    - **rate**: useful operations per second, compared with the machine's matrix products
    - **accuracy**: distance of float32 from float64 on hard streams, compared with the loop over tokens
    - **text**: tokens per second of packing text, counting its pairs and labelling AR-hits
    - **choices**: every backend and chunk size, from which the defaults are chosen
    """
    need_benchmarks("bench")
    from membydesign_bench.run import run

    names = [*(only or ()), *(["choices"] if choices else [])]
    run(names, sizes=size or (), rounds=rounds, threads=threads, device=device, naive=naive, out=out, as_json=as_json)
