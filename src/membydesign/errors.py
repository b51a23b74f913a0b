"""Exceptions and warnings of the library, and helpers for error messages.

Invalid arguments raise a plain `ValueError` that names the argument, what was expected and what was given. The
exception classes below are for valid arguments whose computation failed numerically, or whose kernel could not run;
such failures are never hidden by adding jitter.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class FilterError(ArithmeticError):
    """A filter failed numerically in the floating-point type of its inputs."""


class NotPositiveDefiniteError(FilterError, ValueError):
    r"""A belief covariance is not positive definite: the initial one, or one that the filter computed.

    A filter detects this when the innovation variance $1/\beta_t = r_t^2 + k_t^\top \bar P_t k_t$ is smaller than the
    write noise $r_t^2$ that it contains, so that $\bar P_t$ must have a negative eigenvalue. The message names batch,
    head, group and position.
    """


class NonFiniteError(FilterError):
    """A belief or an output overflowed: finite inputs produced an infinity or a NaN."""


class KernelError(RuntimeError):
    """The GPU kernel requested with `backend="triton"` could not be compiled or launched.

    The message names the Triton version and the cause, which is also chained.
    """


class KernelWarning(UserWarning):
    """A GPU kernel is unavailable, so `backend="auto"` falls back to torch: slower, with the same results.

    Issued once per cause. `warnings.simplefilter("ignore", membydesign.KernelWarning)` silences it, and `"error"`
    instead of `"ignore"` turns it into an exception.
    """


def check_whole_number(name: str, value: object, least: int) -> int:
    """Return `value` if it is an integer of at least `least`; otherwise raise a ValueError that names the argument."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return value


def did_you_mean(unknown: str, names: Iterable[str]) -> str:
    """Suggest the closest known name, as the ending of an error about an unknown one; empty if none is close.

    Examples:
        >>> did_you_mean("bse", ["base", "update"])
        " (did you mean 'base'?)"
    """
    lower = {name.lower(): name for name in names}  # people write KDA and RetNet
    close = get_close_matches(unknown.lower(), list(lower), n=1)
    return f" (did you mean {lower[close[0]]!r}?)" if close else ""
