"""Write a file into saved models through which programs that do not import this package find its classes.

Transformers looks for the class of a configuration in the folder of the model if `trust_remote_code=True`. The file
there imports this package, which registers everything with the Auto classes. Programs that can import
`membydesign.models` should do that instead: then no code in a folder is executed, whoever wrote it.
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
