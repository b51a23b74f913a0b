"""What all commands share: `--json`, refusals, and packages that only some of them need."""

from __future__ import annotations

import os
import stat
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from membydesign.errors import did_you_mean
from membydesign.install import install_hint

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, and nothing else.")]
"""The option of every command that says something."""

DTYPES = ("float64", "float32", "bfloat16", "float16")

UNLIMITED = 10_000
"""A width at which no line is broken."""


def console() -> Console:
    """Standard output, as wide as COLUMNS or the terminal, also through a pipe; elsewhere lines are not broken."""
    out = Console()
    return out if "COLUMNS" in os.environ or out.is_terminal or _piped_at_a_terminal() else Console(width=UNLIMITED)


def _piped_at_a_terminal() -> bool:
    """Whether output goes through a pipe, such as `| less`, while a user sits at a terminal."""
    try:
        piped = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # it is not a file of the system
        return False
    return piped and sys.stderr.isatty()


def fail(message: str) -> typer.Exit:
    """Say what is wrong and what to do, on standard error; exit code 2."""
    Console(stderr=True, soft_wrap=True).print(f"[red]mbd:[/red] {escape(message)}", highlight=False)
    return typer.Exit(2)


def expect_one_of(argument: str, names: Collection[str], given: str) -> None:
    """Refuse a name that is not among those that exist, and suggest the nearest."""
    if given not in names:
        raise fail(f"{argument}: expected one of {', '.join(names)}, got {given!r}{did_you_mean(given, names)}")


def need_models(command: str) -> None:
    """Refuse a command that needs Transformers if it is not there, and say how to get it."""
    _need("membydesign.models", command, "models", "transformers", "safetensors", "tokenizers", "huggingface_hub")


def need_training(command: str) -> None:
    """Refuse a command that needs Accelerate if it is not there, and say how to get it."""
    _need("membydesign.training", command, "training,models", "accelerate", "safetensors")


def _need(module: str, command: str, extra: str, *packages: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise fail(f"mbd {command} needs {error.name}, which is not installed: {install_hint(extra)}") from None


def dtype_of(name: str | None) -> torch.dtype | None:
    """A type of torch by its name; None stays None."""
    import torch

    if name is None:
        return None
    expect_one_of("--dtype", DTYPES, name)
    return getattr(torch, name)
