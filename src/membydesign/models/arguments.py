"""Names of arguments: unknown ones are refused with what was probably meant."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.utils.generic import TransformersKwargs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

PASSED = frozenset({*TransformersKwargs.__optional_keys__, "cache_position", "seq_idx", "token_type_ids"})
"""What Transformers, its tokenizers and its collators pass to every model, whether or not the model uses it."""

LOSS = frozenset({"num_items_in_batch", "ignore_index", "shift_labels"})
"""What Transformers' loss functions take."""


def check_call(model: nn.Module, kwargs: Mapping[str, Any], also: Collection[str] = ()) -> None:
    """Refuse further arguments of `forward` that nobody knows, and requests that cannot be met; None requests nothing.

    Args:
        model: whose `forward` was called.
        kwargs: arguments that it does not name.
        also: names that it knows besides those that Transformers passes to every model.
    """
    for name, value in kwargs.items():
        if value is None:
            continue
        if name not in PASSED and name not in also:
            kind = type(model).__name__
            known = [
                p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD
            ]
            raise unknown(name, value, kind, known)
        if name == "output_attentions" and value:
            raise no_attentions()


def no_attentions() -> ValueError:
    """The error for a request for attention matrices."""
    why = "since memories have no attention matrices (return_variance and return_evidence tell about reads and writes)"
    return ValueError(f"output_attentions: expected False, {why}, got True")


def unknown(
    name: str, value: object, kind: str, known: Collection[str], elsewhere: str | None = None, also: str = ""
) -> ValueError:
    """The error for an argument that nobody knows.

    Args:
        name: what it was called.
        value: what was passed.
        kind: what was called with it.
        known: names that exist.
        elsewhere: what other libraries' name for it is called here, if it is one.
        also: a further hint.
    """
    close = [elsewhere] if elsewhere else get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else ", ".join(known)
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return ValueError(f"{name}: expected an argument of {kind} ({hint}{also}), got {name}={shown}")
