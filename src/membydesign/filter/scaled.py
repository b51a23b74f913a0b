r"""Unknown scales: a kernel of the wrapped design, then the belief about the scale of all tokens at once.

The wrapped design's kernel gives outputs, precisions β and squared errors β‖e‖², which the scale does not change, so

    a_t = δ_t a_{t-1} + m/2,     b_t = δ_t b_{t-1} + ½ β_t ‖e_t‖²

are sums over the sequence, or with a discount a linear recurrence. It is scanned by doubling, in ⌈log₂ T⌉ rounds of
products and sums of positive numbers: no logarithm and no division, so δ_t = 0 is as good as any other number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.belief import ScaledBelief
from membydesign.design import UnknownScale
from membydesign.filter import loop
from membydesign.filter.packing import run_packed
from membydesign.state import map_state

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Request, Run


class Scaled:
    """A kernel that runs `UnknownScale` through a kernel of its base.

    Args:
        kernel: filters the base.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.NAME, self.BACKEND = f"{kernel.NAME}, then its scale", kernel.BACKEND
        self.CHECKS_STATE = getattr(kernel, "CHECKS_STATE", False)

    def why_not(self, design: Design, request: Request) -> str | None:
        """Why the base's kernel cannot filter the request; None if it can."""
        if not isinstance(design, UnknownScale):
            return f"for {design.title}, since this kernel is for UnknownScale"
        return self.kernel.why_not(design.base, of_base(request, design))

    def run(self, design: Design, request: Request) -> Run:
        """Filter [B,T]."""
        assert isinstance(design, UnknownScale)
        run = self.kernel.run(design.base, of_base(request, design))
        if run.squares is None:  # the kernel left it to the loop
            return loop.run(design, request)
        return with_scale(design, run, request.initial, request.x.parameters.get("discount"), request)

    def run_packed(self, design: Design, request: Request) -> list[Run]:
        """Filter packed sequences: the base together and padded, as its kernel allows; each scale by itself.

        A token that leaves memory as it is still counts as an observation of the scale, so scales are not padded.
        """
        assert isinstance(design, UnknownScale)
        assert request.bounds is not None
        runs = run_packed(design.base, of_base(request, design), self.kernel.run, pad=True)
        if runs[0].squares is None:
            return run_packed(design, request, loop.run, pad=False)
        discount = request.x.parameters.get("discount")
        scaled = []
        for n, run in enumerate(runs):
            start, end = request.bounds[n : n + 2]
            initial = map_state(lambda x, n=n: x[n : n + 1], request.initial)
            own = None if discount is None else discount[:, start:end]
            scaled.append(with_scale(design, run, initial, own, request))
        return scaled


def of_base(request: Request, design: UnknownScale) -> Request:
    """What to ask of the base's kernel: the same, with the evidence, which brings the squared errors."""
    names = {parameter.name for parameter in design.base.step_parameters}
    parameters = {name: x for name, x in request.x.parameters.items() if name in names}
    x = request.x._replace(parameters=parameters)
    return request._replace(x=x, initial=request.initial.base, return_evidence=True)


def with_scale(design: UnknownScale, run: Run, initial: ScaledBelief, discount: Tensor | None, request: Request) -> Run:
    """Add the scale to what a kernel computed of the base.

    Args:
        design: the assumptions.
        run: of the base, with precision and squares.
        initial: the state before the first token.
        discount: δ of every token, [B,T,H]; None without one.
        request: what to compute.
    """
    assert run.precision is not None
    assert run.squares is not None
    M, T = run.output.shape[-1], run.output.shape[1]
    half_columns = M // run.squares.shape[-1] / 2
    if discount is None and not (request.return_variance or request.return_evidence):  # only the end matters
        counted = half_columns * T + initial.shape
        return run._replace(state=ScaledBelief(run.state, counted, initial.rate + run.squares.sum(1) / 2))
    added = torch.stack((torch.full_like(run.squares, half_columns), run.squares / 2))  # to a and b, [2,B,T,H,G]
    start = torch.stack((initial.shape, initial.rate))[:, :, None]
    if discount is None:
        before = torch.cat((start, start + added.cumsum(2)), 2)
        after, before = before[:, :, 1:], before[:, :, :-1]
    else:
        factor = discount[None, ..., None].expand_as(added)
        after = scan(factor, added, start)
        before = factor * torch.cat((start, after[:, :, :-1]), 2)
    shape, rate = after[0], after[1]
    variance = evidence = None
    if request.return_variance:
        assert run.variance is not None
        variance = rate / (shape - 1) * run.variance
    if request.return_evidence:
        evidence = design.observed(run.squares, run.precision, before[0], before[1], M).log_evidence
    # copies, so that a belief does not keep the whole sequence in memory
    last = (shape[:, -1].clone(), rate[:, -1].clone()) if T else (initial.shape, initial.rate)
    state = ScaledBelief(run.state, *last)
    return run._replace(state=state, variance=variance, write_log_evidence=evidence)


def scan(factor: Tensor, added: Tensor, start: Tensor) -> Tensor:
    """x_t = factor_t x_{t-1} + added_t along axis 2, from `start`, which has one entry there.

    After the round of step d, x_t holds what tokens t − 2d + 1 to t add, and `factor` what is left of earlier ones.
    """
    first = factor[:, :, :1] * start + added[:, :, :1]
    x, step, T = torch.cat((first, added[:, :, 1:]), 2), 1, added.shape[2]
    while step < T:
        later = x[:, :, step:] + factor[:, :, step:] * x[:, :, :-step]
        x = torch.cat((x[:, :, :step], later), 2)
        factor = torch.cat((factor[:, :, :step], factor[:, :, step:] * factor[:, :, :-step]), 2)
        step *= 2
    return x
