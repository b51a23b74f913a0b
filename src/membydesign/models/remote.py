"""How tools that know nothing of this package load its models: a saved model says where its code is.

Transformers looks for the class of a configuration in the folder of the model if `trust_remote_code=True`. What it
finds there is a file that imports this package, which registers everything with the Auto classes. So no code is copied
into folders, and none is executed but the code that is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign import __version__
from membydesign.files import write_text
from membydesign.install import portable_install_hint

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "memory_by_design"
CLASSES = {"AutoConfig": "MemoryConfig", "AutoModel": "MemoryModel", "AutoModelForCausalLM": "MemoryForCausalLM"}
AUTO_MAP = {auto: f"{MODULE}.{name}" for auto, name in CLASSES.items()}
"""The `auto_map` of every config.json."""

# In a `try`, because Transformers would otherwise tell users to install a package with the name of the import.
_CODE = f'''"""The code of this model is in the package Memory by Design (arXiv 2605.31163).

{portable_install_hint("models")}
"""

try:
    from membydesign.models import {", ".join(sorted(CLASSES.values()))}
except ImportError as error:
    if error.name is not None and not error.name.startswith("membydesign"):
        raise
    package = "this model needs Memory by Design (arXiv 2605.31163), version {__version__} or newer"
    raise ImportError(package + ": {portable_install_hint("models")}") from error

__all__ = {sorted(CLASSES.values())!r}
'''


def write_module(directory: Path) -> None:
    """Write the file that imports this package."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / f"{MODULE}.py", _CODE)
