"""What all commands share: `--json`, refusals, and packages that only some of them need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from membydesign.install import install_hint

if TYPE_CHECKING:
    import torch

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines, and nothing else.")]
"""The option of every command that says something."""

DTYPES = ("float64", "float32", "bfloat16", "float16")


def console() -> Console:
    """Standard output, as wide as it is now."""
    return Console()


def fail(message: str) -> typer.Exit:
    """Say what is wrong and what to do, on standard error; exit code 2."""
    Console(stderr=True, soft_wrap=True).print(f"[red]mbd:[/red] {escape(message)}", highlight=False)
    return typer.Exit(2)


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
    if name not in DTYPES:
        raise fail(f"--dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)
