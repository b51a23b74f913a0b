"""Models and tokenizers as commands are given them: a folder, or a name on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membydesign.cli.completion import dtypes
from membydesign.cli.say import DTYPES, fail

if TYPE_CHECKING:
    import torch

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hugging Face Hub.")]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="SOURCE", help="Folder or Hub name of the tokenizer. Default: the model's.")
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, … Default: a GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}. Default: as stored.", autocompletion=dtypes)
]

TOKENIZER_HINT = (
    "save one there (tokenizer.save_pretrained({model!r})), or name another folder or model with --tokenizer"
)


def quiet() -> None:
    """Let Transformers say nothing but errors."""
    from membydesign.models.quiet import quiet as silence

    silence()


def usable_device(name: str | None) -> str:
    """A device of this PyTorch by its name; a GPU if there is one and no name."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise fail(f"--device: expected cpu, or a device that this PyTorch has, got {device!r} ({error})") from None
    return device


def load_tokenizer(source: str) -> Any:
    """A tokenizer."""
    from transformers import AutoTokenizer

    from membydesign.models.checkpoint import TOKENIZER_FILES

    hint = TOKENIZER_HINT.format(model=source)
    if is_folder(source) and not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
        raise fail(f"no tokenizer in {source}: {hint}")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise fail(f"no tokenizer for {source}: {error}\n{hint}") from None


def load_model(source: str, dtype: torch.dtype | None, device: str) -> Any:
    """A causal language model: one of ours, of flash-linear-attention, or of Transformers."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    from membydesign.models import fla_config, load_fla

    try:
        kind = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
        if kind == fla_config.MODEL_TYPE:
            return load_fla(source, dtype=dtype, device=device)
        asked: Any = "auto" if dtype is None else dtype
        found: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=asked, use_safetensors=True, trust_remote_code=False
        )
        return found.to(device)
    except SafetensorError as error:
        raise fail(f"the weights of {source} cannot be read ({error}); copy or download the model again") from None
    except (OSError, ValueError, ImportError) as error:
        raise fail(f"no model at {source}: {error}") from None


def is_folder(source: str) -> bool:
    """Whether it is a folder; refuses what can be neither a folder nor a name on the Hub."""
    if Path(source).is_dir():
        return True
    if Path(source).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source):
        raise fail(f"MODEL: expected a folder or a name on the Hugging Face Hub, got {source!r}")
    return False
