"""Checks of values on a GPU: all in one look, after the filter has run.

The CPU only queues work for a GPU; to look at a number it waits until all of that is done. So there nothing is looked
at before the filter: every condition becomes one bit on the device, and the bits are read together, once, at the end.
Only if one is set are the checks of `ops.checks` gone through, which say what is wrong. On a CPU looking costs nothing,
and bad input is refused before anything runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.ops import checks
from membydesign.ops.transforms import values

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.belief import Belief
    from membydesign.design import DesignModel
    from membydesign.ops.inputs import Inputs

AT_ONCE = ("cpu", "meta")
"""Devices whose values can be looked at without waiting, or have none."""


class Given(NamedTuple):
    """What a filter is given.

    Attributes:
        design: the assumptions.
        inputs: all that comes with tokens.
        belief: the belief to start from, or None if it is the design's own prior.
        name: what the user calls the belief.
        definite: whether its covariance is to be shown positive semi-definite, which takes a factorisation.
    """

    design: DesignModel
    inputs: Inputs
    belief: Belief | None
    name: str
    definite: bool

    def check(self) -> None:
        """Refuse bad values."""
        checks.check_values(self.design, self.inputs)
        if self.belief is not None:
            checks.check_belief_values(self.belief, self.name, definite=self.definite)


def check_before(given: Given) -> None:
    """Refuse bad values before the filter runs, where looking at them costs nothing."""
    if not _waits(given.inputs.q):
        given.check()


def check_after(given: Given, precision: Tensor, **results: Tensor | None) -> None:
    """Raise if a filter was not carried through and, where nobody has looked yet, refuse bad values.

    Args:
        given: what the filter was given.
        precision: β of every step, [B,T,H,G].
        results: everything it found, by name.
    """
    if _waits(precision):
        if not bool(values(_suspicion(given, precision, results)).any()):
            return
        given.check()
    checks.check_found(precision, given.inputs, **results)


def _waits(x: Tensor) -> bool:
    return x.device.type not in AT_ONCE and not torch.compiler.is_compiling()


def _suspicion(given: Given, precision: Tensor, results: dict[str, Tensor | None]) -> Tensor:
    """Whether any check may have something to say: one bit, on the device."""
    signs = {parameter.name: parameter.bound for parameter in given.design.step_parameters}
    found, noise = [], given.inputs.write_noise
    for name, x in given.inputs._asdict().items():
        found += _out_of_bounds(x, signs.get(name))
    for x in (*(given.belief or ()), *results.values()):
        found += _out_of_bounds(x)
    if given.belief is not None:
        found += _indefinite(given.belief, given.definite)
    found += _out_of_bounds(precision, "> 0")
    found.append((precision * noise).amax() > checks.precision_bound(precision.dtype))
    return torch.stack(found).any()


def _out_of_bounds(x: Tensor | None, bound: str | None = None) -> list[Tensor]:
    if x is None:
        return []
    smallest, largest = torch.aminmax(x.detach())
    beyond = {"> 0": smallest <= 0, ">= 0": smallest < 0, "<= 0": largest > 0}
    bad = [~torch.isfinite(smallest), ~torch.isfinite(largest)]
    return [*bad, beyond[bound]] if bound in beyond else bad


def _indefinite(belief: Belief, definite: bool) -> list[Tensor]:
    P = belief.covariance
    if P is None:
        return []
    if P.ndim == belief.mean.ndim:
        return [(P < 0).any()]
    if not definite:
        return []
    asymmetry, rounding, info = checks.symmetry_and_sign(P.detach())
    return [asymmetry > rounding, (info != 0).any()]
