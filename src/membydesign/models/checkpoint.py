"""Checkpoints as they lie on disk: a folder with config.json and safetensors, read without unpickling anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from membydesign.files import hub_name, read_object

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

CONVERT_PICKLE = (
    """python -c "import torch, safetensors.torch as s; w = torch.load('{file}', weights_only=True); """
    """s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, 'model.safetensors')\""""
)
"""Command that converts a pickle of tensors."""

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
        name: its name in the file.
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
        config = read_config(folder / "config.json")
        tensors: dict[str, StoredTensor] = {}
        for file in weight_files(folder):
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
    name = hub_name("source", source)
    if name is None:
        return Path(source)
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.safetensors", "*.json", *TOKENIZER_FILES]
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"source: no folder {source!s} here, and no download from the Hub: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        ValueError: if there are none; names files of other formats, which are not opened.
    """
    if (folder / INDEX).exists():
        weight_map = read_config(folder / INDEX).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(
                f"source: expected in {str(folder / INDEX)!r} a weight_map from tensors to names of files, "
                f"got {repr(weight_map)[:200]}"
            )
        shards = sorted(set(weight_map.values()))
        astray = [name for name in shards if Path(name).name != name or "\0" in name or not _is_file(folder / name)]
        if astray or not shards:
            raise ValueError(
                f"source: expected in {str(folder)!r} the files that {INDEX} names, got none of {', '.join(astray)}"
                if astray
                else f"source: expected a weight_map in {str(folder / INDEX)!r}, got none"
            )
        return [folder / name for name in shards]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"source: expected {WEIGHTS}, or {INDEX}, in {str(folder)!r}, got {names}")
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    got = (
        f"only {', '.join(pickles)}: a pickle can run any code when it is opened, so it is not opened. If you trust "
        "its source, convert it once: " + CONVERT_PICKLE.format(file=pickles[0])
        if pickles
        else "no weights"
    )
    raise ValueError(f"source: expected *.safetensors in {str(folder)!r}, got {got}")


def inspect(source: str, own: str) -> tuple[str, str | None]:
    """Look at a model before anything is built from it.

    Args:
        source: folder or name on the Hugging Face Hub.
        own: model_type of our models, of which more can be checked.

    Returns:
        The folder or name for Transformers, and the model_type in config.json.

    Raises:
        ValueError: as `check_folder`, or if there is no such folder.
    """
    name = hub_name("source", source)
    if name is not None:
        return name, PreTrainedConfig.get_config_dict(name)[0].get("model_type")
    kind = read_config(Path(source, "config.json")).get("model_type")
    if kind == own:
        check_folder(Path(source))
    else:
        weight_files(Path(source))
    return source, kind


def check_folder(folder: Path) -> None:
    """Check a folder of one of our models before anything is built from its config.json.

    Raises:
        ValueError: if config.json is not an object, if there are no safetensors, or if there are more layers than
            tensors, which could take minutes to build only to be refused.
    """
    layers = read_config(folder / "config.json").get("num_hidden_layers")
    tensors = 0
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                tensors += len(file.keys())
        except SafetensorError:
            return  # whose reading raises an error that says more
    if isinstance(layers, int) and layers > tensors:
        raise ValueError(
            f"num_hidden_layers: expected at most {tensors} in {str(folder / 'config.json')!r}, the number of stored "
            f"tensors, got {layers}"
        )


def read_config(file: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; raises a ValueError that names the file."""
    try:
        return read_object(file)
    except FileNotFoundError:
        raise ValueError(f"source: expected {file.name} in {str(file.parent)!r}, got none") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"source: {error}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False
