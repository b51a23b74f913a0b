"""Errors that a filter raises while it runs, and the warning about GPU kernels that cannot be used.

Bad arguments raise plain `ValueError`s that name the argument, what was expected and what came. The errors here are
for good arguments whose computation could not be carried through: they are never papered over with jitter.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class FilterError(ArithmeticError):
    """A filter could not be carried through in the given floating-point type."""


class NotPositiveDefiniteError(FilterError, ValueError):
    r"""A belief covariance is not positive definite: the one that a filter was given, or one that it came to.

    On the way, the innovation variance $1/\beta_t = r_t^2 + k_t^\top \bar P_t k_t$ came out below the write noise
    $r_t^2$ that it contains, which proves that $\bar P_t$ has a negative direction. The message names batch, head,
    group and position.
    """


class NonFiniteError(FilterError):
    """A belief or an output overflowed: finite inputs gave an infinity or a NaN."""


class KernelError(RuntimeError):
    """A GPU kernel that `backend="triton"` insists on could not be compiled or launched.

    The message names the version of Triton and the cause, which is chained.
    """


class KernelWarning(UserWarning):
    """A GPU kernel cannot be used, so `backend="auto"` filters through torch: more slowly, with the same results.

    Issued once for each cause. `warnings.simplefilter("ignore", membydesign.KernelWarning)` silences it, and `"error"`
    instead of `"ignore"` turns it into an exception.
    """


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Ends an error about an unknown name with the nearest that exists; empty if none is near.

    Example:
        >>> did_you_mean("bse", ["base", "update"])
        " (did you mean 'base'?)"
    """
    lower = {name.lower(): name for name in names}  # people write KDA and RetNet
    near = get_close_matches(given.lower(), list(lower), n=1)
    return f" (did you mean {lower[near[0]]!r}?)" if near else ""
