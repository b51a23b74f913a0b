"""Numbers that are not finite stop a model, with the layer that made them and the likely cause.

The smallest and the largest output of every block are enough to know. On a CPU they are read at once. Reading a value
from another device forces a sync, so there all of them are read together after the last block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.errors import FilterError, NonFiniteError
from membydesign.filter import transforms
from membydesign.layers.finite import weight_error

if TYPE_CHECKING:
    from torch import Tensor, nn


class Seen(NamedTuple):
    """What is to be read later.

    Attributes:
        finite: whether all values are, on their device.
        dtype: the type of all values.
        place: what made them.
        module: whose weights did; None if the caller passed them.
        prefix: of the names of its weights.
    """

    finite: Tensor
    dtype: torch.dtype
    place: str
    module: nn.Module | None
    prefix: str


class FiniteCheck:
    """The check of one call of a model."""

    at_once: tuple[str, ...] = ("cpu",)
    """Devices whose values can be read without a sync."""

    def __init__(self) -> None:
        self._later: list[Seen] = []

    def see(self, x: Tensor, place: str, module: nn.Module | None, prefix: str = "") -> None:
        """Raise if x is not finite, or let `read` do so.

        Args:
            x: an output.
            place: what made it.
            module: whose weights made it; None if the caller passed x, under the name `place`.
            prefix: of the names of its weights.
        """
        if _values_are_hidden(x):
            return
        x = transforms.values(x)
        if not x.numel():
            return
        smallest, largest = torch.aminmax(x)
        if x.device.type not in self.at_once:
            self._later.append(Seen(smallest.isfinite() & largest.isfinite(), x.dtype, place, module, prefix))
        elif not (math.isfinite(smallest.item()) and math.isfinite(largest.item())):
            raise not_finite(place, module, x.dtype, prefix)

    def read(self) -> None:
        """Raise if anything was not finite, in one read from the device."""
        if not self._later:
            return
        device = self._later[-1].finite.device
        finite = torch.stack([seen.finite.to(device) for seen in self._later]).tolist()
        if not all(finite):
            _, dtype, place, module, prefix = self._later[finite.index(False)]
            raise not_finite(place, module, dtype, prefix)
        self._later.clear()


def not_finite(
    place: str, module: nn.Module | None, dtype: torch.dtype, prefix: str = ""
) -> ArithmeticError | ValueError:
    """The error for an output that is not finite."""
    if module is None:
        return ValueError(f"{place}: expected finite values, got NaN or infinity")
    blamed = weight_error(place, module, prefix)
    if blamed is not None:
        return blamed
    wider = "use bfloat16 or float32, whose range is larger" if dtype == torch.float16 else "its weights are too large"
    return NonFiniteError(f"{place}: the weights are finite, and the output overflowed in {dtype}: {wider}")


def named(error: Exception, place: str, module: nn.Module) -> Exception:
    """An error of a layer with its place, if numbers are the reason; an error about the caller's arguments as it is."""
    blamed = weight_error(place, module)
    if blamed is not None:
        return blamed
    if isinstance(error, FilterError):
        return type(error)(f"{place}: {error}")
    design = getattr(getattr(module, "mixer", None), "design", None)
    names = ("q", "k", "v", *(parameter.name for parameter in (design.step_parameters if design else ())))
    about_numbers = str(error).partition(":")[0] in names  # which the layer made, not the caller
    return (NonFiniteError if "finite" in str(error) else FilterError)(f"{place}: {error}") if about_numbers else error


def _values_are_hidden(x: Tensor) -> bool:
    """Whether x has no values to read: while torch traces or captures, or on the meta device."""
    if torch.compiler.is_compiling() or x.is_meta:
        return True
    if transforms.followed():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
