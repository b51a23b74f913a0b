"""Language models for Transformers: `MemoryConfig`, `MemoryModel`, `MemoryForCausalLM`, known to the Auto classes.

`load_fla` makes one from a Gated DeltaNet that flash-linear-attention saved.

Importing this package registers them: `AutoModelForCausalLM.from_pretrained` then reads what `save_pretrained` wrote.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from membydesign.install import install_hint

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    package = (error.name or "transformers").partition(".")[0]
    raise ModuleNotFoundError(
        f"membydesign.models needs {package}: {install_hint('models')}", name=error.name
    ) from error

from membydesign.models.cache import MemoryCache
from membydesign.models.configuration import MemoryConfig
from membydesign.models.context_parallelism import context_parallel
from membydesign.models.conversion import Conversion, convert_fla, load_fla
from membydesign.models.modeling import MemoryForCausalLM, MemoryModel
from membydesign.models.outputs import (
    MemoryCausalLMOutput,
    MemoryGenerateBeamOutput,
    MemoryGenerateOutput,
    MemoryModelOutput,
)
from membydesign.models.token_losses import next_token_losses, token_cross_entropies, token_divergences

if TYPE_CHECKING:
    from membydesign.models.tensor_parallelism import tensor_parallel, tensor_parallel_plan

AutoConfig.register(MemoryConfig.model_type, MemoryConfig, exist_ok=True)
AutoModel.register(MemoryConfig, MemoryModel, exist_ok=True)
AutoModelForCausalLM.register(MemoryConfig, MemoryForCausalLM, exist_ok=True)


def __getattr__(name: str) -> Any:
    """Import tensor parallelism when it is used: DTensors take long to import."""
    if name in ("tensor_parallel", "tensor_parallel_plan"):
        return getattr(import_module("membydesign.models.tensor_parallelism"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Conversion",
    "MemoryCache",
    "MemoryCausalLMOutput",
    "MemoryConfig",
    "MemoryForCausalLM",
    "MemoryGenerateBeamOutput",
    "MemoryGenerateOutput",
    "MemoryModel",
    "MemoryModelOutput",
    "context_parallel",
    "convert_fla",
    "load_fla",
    "next_token_losses",
    "tensor_parallel",
    "tensor_parallel_plan",
    "token_cross_entropies",
    "token_divergences",
]
