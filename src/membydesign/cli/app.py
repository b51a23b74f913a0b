"""The application `mbd`: every command comes from the module of its name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from membydesign import __version__
from membydesign.cli.bench import bench
from membydesign.cli.catalogue import catalogue
from membydesign.cli.compare import compare
from membydesign.cli.convert import convert
from membydesign.cli.evaluate import evaluate
from membydesign.cli.explore import explore
from membydesign.cli.export import export
from membydesign.cli.generate import generate
from membydesign.cli.group import StoppableGroup
from membydesign.cli.kernels import kernels
from membydesign.cli.report import report
from membydesign.cli.reproduce import reproduce

app = typer.Typer(
    cls=StoppableGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

for command in (catalogue, explore, compare, reproduce, report, generate, convert, export, bench):
    app.command()(command)
app.add_typer(evaluate, name="evaluate")
app.add_typer(kernels, name="kernels")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"memory-by-design {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Memory by Design: state what a memory assumes, get its exact Bayesian filter.

    For example: `mbd catalogue` lists the designs, and `mbd reproduce collision` checks claims of the paper in seconds.

    `mbd COMMAND -h` explains a command.
    """


if __name__ == "__main__":
    sys.exit(app())
