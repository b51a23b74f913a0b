"""`mbd kernels`: check the Triton kernels without a GPU, with the checks of a checkout."""

from __future__ import annotations

from typing import Annotated

import typer

from membydesign.cli.output import AsJson  # noqa: TC001 - typer reads it
from membydesign.cli.requirements import need_benchmarks

kernels = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@kernels.callback()
def about() -> None:
    """Check the Triton kernels for GPUs.

    For example: `mbd kernels check --sizes 16 --targets sm_90`
    """


@kernels.command()
def check(
    targets: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="GPUs to compile for: sm_80, sm_90, gfx942. Default: all that Triton can."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Key sizes: 16, 32, 64, 128, 256. Default: all.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Variants of each kernel: decay, rotation, tf32x3, float64. Default: all."),
    ] = None,
    run: Annotated[bool, typer.Option(help="Run the kernels in Triton's interpreter.")] = True,
    compile: Annotated[bool, typer.Option(help="Compile the kernels.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run every kernel in Triton's interpreter and compile it for real GPUs.

    For example: `mbd kernels check --sizes 16 --targets sm_90`

    Needs no GPU, and runs from a checkout, since these checks are not part of the installed package. The interpreter's
    results are compared with the loop over tokens in float64.

    Exits with 1 if a distance exceeds its limit, if a kernel does not compile, if a block would need more shared memory
    than its GPU has, or if registers spill in every layout at D ≤ 64 on NVIDIA's GPUs. Nothing is timed, because that
    takes a GPU.
    """
    need_benchmarks("kernels check")
    from kernel_checks.run import run_checks

    run_checks(targets, sizes, variants, run=run, compile=compile, as_json=as_json)
