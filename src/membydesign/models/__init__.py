"""Language models for Transformers: `MemoryConfig`, `MemoryModel`, `MemoryForCausalLM`, known to the Auto classes.

Importing this package registers them: `AutoModelForCausalLM.from_pretrained` then reads what `save_pretrained` wrote.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from membydesign.models.cache import MemoryCache
from membydesign.models.configuration import MemoryConfig
from membydesign.models.modeling import MemoryForCausalLM, MemoryModel
from membydesign.models.outputs import MemoryCausalLMOutput, MemoryModelOutput

AutoConfig.register(MemoryConfig.model_type, MemoryConfig, exist_ok=True)
AutoModel.register(MemoryConfig, MemoryModel, exist_ok=True)
AutoModelForCausalLM.register(MemoryConfig, MemoryForCausalLM, exist_ok=True)

__all__ = [
    "MemoryCache",
    "MemoryCausalLMOutput",
    "MemoryConfig",
    "MemoryForCausalLM",
    "MemoryModel",
    "MemoryModelOutput",
]
