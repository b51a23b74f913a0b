"""Functions of Transformers' layers that this library replaces: each with its name, arguments and fallback."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils.import_utils import is_torchdynamo_exporting

if TYPE_CHECKING:
    from collections.abc import Callable


class Replacement(NamedTuple):
    """What stands in for a function of Transformers.

    Attributes:
        parameters: the arguments that the function must have, in order.
        function: ours, with the same arguments; it may take more by keyword, and may return NotImplemented.
    """

    parameters: tuple[str, ...]
    function: Callable[..., Any]

    def why_not(self, original: Callable[..., Any]) -> str | None:
        """Why this cannot stand in for a function; None if it can."""
        theirs = tuple(p.name for p in inspect.signature(original).parameters.values() if p.kind is not p.VAR_KEYWORD)
        if theirs == self.parameters:
            return None
        return f"expected the arguments {', '.join(self.parameters)}, got {', '.join(theirs)}"

    def instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Our function, which calls the original for what it does not do: other devices than a CPU, tracing, export."""
        ours = self.function

        @functools.wraps(inspect.unwrap(original))
        def function(*args: Any, **kwargs: Any) -> Any:
            if _on_cpu(args, kwargs):
                result = ours(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return original(*args, **kwargs)

        return function


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if tracing or is_torchdynamo_exporting():
        return False
    return all(x.is_cpu and x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
