"""Small trained models that come with a checkout, so that commands and examples work without training.

The name `example:characters` stands for a folder `examples/pretrained/characters` of the checkout that this copy of the
package runs from or was installed from. The wheel itself holds no weights.
"""

from __future__ import annotations

from pathlib import Path

from membydesign.errors import did_you_mean
from membydesign.install import source_folder

PREFIX = "example:"
"""How commands tell an example from a folder and from a name on the Hugging Face Hub."""

PLACE = Path("examples", "pretrained")
TEXT = "text.txt"
"""A text that suits the model, in its folder."""


def names() -> list[str]:
    """Return the names of the examples that are there, without the prefix; empty without a checkout."""
    root = source_folder()
    return [] if root is None else sorted(path.parent.name for path in (root / PLACE).glob("*/config.json"))


def folder(name: str) -> Path:
    """Return the folder of an example, for `from_pretrained` of a model and its tokenizer.

    Args:
        name: such as "characters", or "example:characters".

    Raises:
        ValueError: if there is no such example, or no checkout.

    Examples:
        >>> from membydesign import pretrained
        >>> from membydesign.models import MemoryForCausalLM  # doctest: +SKIP
        >>> model = MemoryForCausalLM.from_pretrained(pretrained.folder("characters"))  # doctest: +SKIP
    """
    name, root, known = name.removeprefix(PREFIX), source_folder(), names()
    if root is None or not known:
        raise ValueError(
            f"MODEL: expected a checkout of memory-by-design for {PREFIX + name!r}, since example models are in its "
            f"{PLACE}, and this copy was not installed from one; clone the repository and name the folder, or train a "
            "model: python examples/characters.py"
        )
    if name not in known:
        every = ", ".join(PREFIX + each for each in known)
        raise ValueError(f"MODEL: expected one of {every}, got {PREFIX + name!r}{did_you_mean(name, known)}")
    return root / PLACE / name
