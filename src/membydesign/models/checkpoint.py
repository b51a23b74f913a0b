"""Checkpoints as they lie on disk: a folder with config.json and safetensors, read without unpickling anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
)
"""What a tokenizer may consist of."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS: dict[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class StoredTensor(NamedTuple):
    """A tensor in a file, not read yet.

    Attributes:
        file: where it is.
        name: what it is called there.
        shape: its shape.
        dtype: its type, or the file's word for it if it is not a floating-point number of 16 bits or more.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return torch.Size(self.shape).numel()

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor, or some of its rows, mapped from the file: nothing is in memory before it is looked at."""
        # A file is opened for each tensor, so that what was read before is not held.
        with safe_open(self.file, "pt") as file:
            return file.get_tensor(self.name) if rows is None else file.get_slice(self.name)[rows]


class Checkpoint(NamedTuple):
    """A folder of weights.

    Attributes:
        folder: where it is.
        config: its config.json.
        tensors: what is in its safetensors, by name.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @staticmethod
    def open(source: str | PathLike[str], revision: str | None = None) -> Checkpoint:
        """Look into a local folder, or one from the Hugging Face Hub; no weights are read yet."""
        folder = folder_of(source, revision)
        config = _json(folder / "config.json")
        tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder):
            try:
                with safe_open(file, "pt") as opened:
                    names = list(opened.keys())
                    slices = [opened.get_slice(name) for name in names]
                    shapes = [(tuple(part.get_shape()), part.get_dtype()) for part in slices]
            except SafetensorError as error:
                raise ValueError(f"source: expected safetensors, got a damaged file {str(file)!r}: {error}") from error
            for name, (shape, dtype) in zip(names, shapes, strict=True):
                if name in tensors:
                    raise ValueError(
                        f"source: expected each tensor once, got {name!r} in {tensors[name].file.name} and {file.name}"
                    )
                tensors[name] = StoredTensor(file, name, shape, _FLOATS.get(str(dtype), str(dtype)))
        return Checkpoint(folder, config, tensors)


def folder_of(source: str | PathLike[str], revision: str | None = None) -> Path:
    """A local folder as it is, or a model of the Hub, of which weights (safetensors only) and text files come."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"source: expected a folder or a name on the Hugging Face Hub, and {str(source)!r} is a file")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(source)):
        raise ValueError(f"source: expected a folder or a name on the Hugging Face Hub, got no such folder {source!s}")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.safetensors", "*.json", *TOKENIZER_FILES]
        return Path(huggingface_hub.snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"source: no folder {source!s} here, and none could be had from the Hub: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        shards = sorted(set(_json(folder / INDEX).get("weight_map", {}).values()))
        astray = [name for name in shards if Path(name).name != name or not (folder / name).is_file()]
        if astray or not shards:
            raise ValueError(
                f"source: expected in {str(folder)!r} the files that {INDEX} names, got none of {', '.join(astray)}"
                if astray
                else f"source: expected a weight_map in {str(folder / INDEX)!r}, got none"
            )
        return [folder / name for name in shards]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"source: expected {WEIGHTS}, or {INDEX}, in {str(folder)!r}, got {names}")
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    got = (
        f"only {', '.join(pickles)}: a pickle can run any code when it is opened, so none is. Whoever trusts it can "
        "write it anew with safetensors.torch.save_file"
        if pickles
        else "no weights"
    )
    raise ValueError(f"source: expected *.safetensors in {str(folder)!r}, got {got}")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"source: expected {file.name} in {str(file.parent)!r}, got none") from None
    except ValueError as error:
        raise ValueError(f"source: expected JSON in {str(file)!r}, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"source: expected a JSON object in {str(file)!r}, got {type(found).__name__}")
    return found
