"""The code of this model is in the package Memory by Design (arXiv 2605.31163).

pip install '/path/to/memory-by-design[models]'
"""

try:
    from membydesign.models import MemoryConfig, MemoryForCausalLM, MemoryModel
except ImportError as error:
    if error.name is not None and not error.name.startswith("membydesign"):
        raise
    package = "this model needs Memory by Design (arXiv 2605.31163), version 0.1.0 or newer"
    raise ImportError(package + ": pip install '/path/to/memory-by-design[models]'") from error

__all__ = ["MemoryConfig", "MemoryForCausalLM", "MemoryModel"]
