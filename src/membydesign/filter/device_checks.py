"""Checks of values on a GPU: all of them in one read, after the filter has run.

Reading a value forces a device sync, so on a GPU all checks collapse into one flag: every condition becomes one bit on
the device, and the bits are read together, once, at the end. Only if one is set do the checks of `filter.checks` run,
which say what is wrong. On a CPU bad input is refused before anything runs, with one exception: q, k and v, which are
most of the input, are not looked at where the kernel passes on what is not finite (`passes_on`). They are checked
afterwards if a result is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.errors import FilterError
from membydesign.filter import checks, result_checks
from membydesign.filter.transforms import values
from membydesign.state import named_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Inputs

AT_ONCE = ("cpu", "meta")
"""Devices whose values can be read without waiting, or have none."""


class Arguments(NamedTuple):
    """What a filter was called with.

    Attributes:
        design: the assumptions.
        inputs: all that comes with tokens.
        state: the state to start from, or None if it is the design's own prior.
        name: the argument that carries the state.
        thorough: whether its covariance must be shown positive semi-definite, which takes a factorisation.
    """

    design: Design
    inputs: Inputs
    state: tuple | None
    name: str
    thorough: bool

    @property
    def only_finite(self) -> tuple[str, ...]:
        """Which of q, k and v have no bound but that they are finite."""
        bounds = checks.bounds_of(self.design)
        return tuple(name for name in ("q", "k", "v") if bounds[name] == "finite")

    def check(self, *, sequences: bool = True) -> None:
        """Refuse bad values; without `sequences`, leave out those of q, k and v that need only be finite."""
        checks.check_values(self.design, self.inputs, skip=() if sequences else self.only_finite)
        if self.state is not None:
            checks.check_state_values(self.design, self.state, self.name, thorough=self.thorough)


def check_before(arguments: Arguments, *, sequences: bool = True) -> None:
    """Refuse bad values before the filter runs, where reading them makes nobody wait."""
    if not _waits(arguments.inputs.q):
        arguments.check(sequences=sequences)


def check_sequences_before(arguments: Arguments, kernel: Any) -> None:
    """Refuse what `check_before` without `sequences` left out, unless the kernel's results will show it."""
    passes_on = getattr(kernel, "passes_on", None)
    if not _waits(arguments.inputs.q) and (passes_on is None or not passes_on(arguments.design)):
        checks.check_values(arguments.design, arguments.inputs, only=arguments.only_finite)


def check_after(
    arguments: Arguments, precision: Tensor | None, results: Mapping[str, Tensor | None], state: Any
) -> None:
    """Raise if a filter broke down and, where values were not read yet, refuse bad ones.

    Args:
        arguments: what the filter was called with.
        precision: β of every step, [B,T,H,G], of a design that has one.
        results: everything it computed, by name.
        state: the state at the end, which must be good enough to start from; None if the kernel made sure of it.
    """
    noise = arguments.design.observation_noise(arguments.inputs.parameters)
    if _waits(arguments.inputs.q):
        if not bool(values(_suspicion(arguments, precision, noise, results, state)).any()):
            return
        arguments.check()
    try:
        result_checks.check_results(precision, noise, results)
    except FilterError:
        arguments.check()  # perhaps for a reason that was there before
        raise
    if state is not None:
        thorough = arguments.thorough or result_checks.was_sure(precision, noise)
        result_checks.check_final_state(arguments.design, state, arguments.inputs.q, thorough=thorough)


def _waits(x: Tensor) -> bool:
    return x.device.type not in AT_ONCE and not torch.compiler.is_compiling()


def _suspicion(
    arguments: Arguments,
    precision: Tensor | None,
    noise: Tensor | None,
    results: Mapping[str, Tensor | None],
    state: Any,
) -> Tensor:
    """Whether any check may have something to say: one bit, on the device."""
    bounds, bits = checks.bounds_of(arguments.design), []
    for name, x in arguments.inputs.named().items():
        bits += _suspicious(x, bounds[name])
    for x in results.values():
        bits += _suspicious(x)
    if arguments.state is not None:
        for _, x in named_tensors(arguments.state):
            bits += _suspicious(x)
        for flaw in arguments.design.state_flaws(arguments.state, thorough=arguments.thorough):
            bits.append(flaw.where.any())
    if state is not None:
        for flaw in arguments.design.state_flaws(state, thorough=arguments.thorough):
            bits.append(flaw.where.any())
    if precision is not None:
        bits += _suspicious(precision, "> 0")
        if noise is not None:
            bits.append((precision * noise).amax() > result_checks.precision_bound(precision.dtype))
    return torch.stack(bits).any()


def _suspicious(x: Tensor | None, bound: str = "finite") -> list[Tensor]:
    if x is None:
        return []
    smallest, largest = extremes = torch.aminmax(x.detach())
    return [~torch.isfinite(smallest), ~torch.isfinite(largest), *(checks.out_of_bounds(e, bound) for e in extremes)]
