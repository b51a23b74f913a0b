"""Load models and tokenizers from a folder or from the Hugging Face Hub, and the options that commands share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from membydesign import pretrained
from membydesign.cli.completion import DTYPES, dtypes
from membydesign.cli.output import expect_one_of, fail
from membydesign.files import hub_name

if TYPE_CHECKING:
    import torch


def located(source: str | None) -> str | None:
    """Return the folder that a name such as example:characters stands for; any other source as it is."""
    if source is None or not source.startswith(pretrained.PREFIX):
        return source
    try:
        return str(pretrained.folder(source))
    except ValueError as error:
        raise fail(str(error)) from None


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a name on the Hugging Face Hub, or example:characters.",
        callback=located,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="SOURCE", help="Folder or Hub name of the tokenizer. Default: the model's.", callback=located),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, … Default: a GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}. Default: as stored.", autocompletion=dtypes)
]

Accelerate = Annotated[
    bool,
    typer.Option(
        "--accelerate",
        metavar="",
        help="Run Gated DeltaNet, KDA and Mamba-2 layers of a Transformers model on this package's CPU kernels.",
    ),
]

TOKENIZER_HINT = (
    "save one there (tokenizer.save_pretrained({model!r})), or name another folder or model with --tokenizer"
)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of a name; None stays None."""
    import torch

    if name is None:
        return None
    expect_one_of("--dtype", DTYPES, name)
    return getattr(torch, name)


def usable_device(name: str | None) -> str:
    """Check that PyTorch has a device and return its name; without a name, a GPU if there is one."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise fail(f"--device: expected cpu, or a device that this PyTorch has, got {device!r} ({error})") from None
    return device


def load_tokenizer(source: str) -> Any:
    """Load a tokenizer."""
    from transformers import AutoTokenizer

    from membydesign.models.checkpoint import TOKENIZER_FILES

    hint, name = TOKENIZER_HINT.format(model=source), name_on_the_hub(source)
    if name is None and not any((Path(source) / file).is_file() for file in TOKENIZER_FILES):
        raise fail(f"no tokenizer in {source}: {hint}")
    try:
        return AutoTokenizer.from_pretrained(name or source, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise fail(f"no tokenizer for {source}: {error}\n{hint}") from None


def load_model(source: str, dtype: torch.dtype | None, device: str) -> Any:
    """Load a causal language model: one of this package, of flash-linear-attention, or of Transformers."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import membydesign.integrations.transformers  # noqa: F401 - registers retrofitted models
    from membydesign.models import MemoryConfig, fla_config, load_fla
    from membydesign.models.checkpoint import inspect

    name_on_the_hub(source)
    try:
        name, kind = inspect(source, MemoryConfig.model_type)
        if kind == fla_config.MODEL_TYPE:
            return load_fla(source, dtype=dtype, device=device)
        stored_or_named: Any = "auto" if dtype is None else dtype
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=stored_or_named, use_safetensors=True, trust_remote_code=False
        )
        return model.to(device)
    except SafetensorError as error:
        raise fail(f"the weights of {source} cannot be read ({error}); copy or download the model again") from None
    except (OSError, ValueError, ImportError) as error:
        raise fail(f"no model at {source}: {error}") from None


def accelerated(model: Any) -> Any:
    """Put our kernels under a model's recurrent layers, for as long as it lives; exit with an error if it has none."""
    from membydesign.integrations.transformers import accelerate

    try:
        accelerate(model)
    except (ValueError, RuntimeError) as error:
        raise fail(f"--accelerate: {error}") from None
    return model


def name_on_the_hub(source: str) -> str | None:
    """Return the Hub name of a model or tokenizer, and say once that there is no such folder; None for a folder.

    Exits with an error if it is neither.
    """
    try:
        name = hub_name("MODEL", source)
    except ValueError as error:
        meant = f"; {pretrained.PREFIX}{source} is in this checkout" if source in pretrained.names() else ""
        raise fail(f"{error}{meant}") from None
    if name == source:
        _say_no_folder(source)
    return name


@cache
def _say_no_folder(source: str) -> None:
    told = f"no folder {source} here; looking for it on the Hugging Face Hub"
    Console(stderr=True, soft_wrap=True).print(f"[dim]mbd: {escape(told)}[/dim]", highlight=False)
