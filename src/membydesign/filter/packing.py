"""Packed sequences: those of similar length are filtered together, as a batch.

Shorter ones are padded at the end with tokens that leave memory as it is, so that nothing changes but speed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from membydesign.filter.inputs import Inputs, Request, Run
from membydesign.state import map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from membydesign.design import Design

PADDING = 1.25
"""A batch is at most this many times as large as the tokens in it."""


def run_packed(design: Design, request: Request, run: Callable[[Design, Request], Run], *, pad: bool) -> list[Run]:
    """One run for each sequence, in their order.

    Args:
        design: the assumptions.
        request: all sequences one after another, [1,T,...], their bounds, and a state for each.
        run: the kernel, which filters a batch.
        pad: whether sequences may be padded; the kernel then skips idle tokens exactly.
    """
    assert request.bounds is not None
    rows = [request.x.between(start, end) for start, end in pairwise(request.bounds)]
    lengths = [end - start for start, end in pairwise(request.bounds)]
    pad = pad and all(parameter.idle is not None for parameter in design.step_parameters)
    runs: dict[int, Run] = {}
    for batch in batches(lengths, PADDING if pad else 1.0):
        longest = max(lengths[n] for n in batch)
        together = Inputs.stacked([rows[n].padded(longest, design) for n in batch])
        initial = map_state(lambda x, batch=batch: x[batch], request.initial)
        result = run(design, request._replace(x=together, initial=initial, bounds=None))
        for i, n in enumerate(batch):
            runs[n] = _one_of(result, i, lengths[n])
    for n in range(len(lengths)):
        if not lengths[n]:  # nothing happened to its state
            untouched = map_state(lambda x, n=n: x[n : n + 1], request.initial)
            runs[n] = _one_of(next(iter(runs.values())), 0, 0)._replace(state=untouched)
    return [runs[n] for n in range(len(lengths))]


def batches(lengths: Sequence[int], padding: float) -> list[list[int]]:
    """Sequences from short to long without empty ones, as many together as `padding` allows."""
    groups: list[list[int]] = []
    tokens = 0
    for n in sorted((n for n in range(len(lengths)) if lengths[n]), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[n] <= padding * (tokens + lengths[n]):
            groups[-1].append(n)
            tokens += lengths[n]
        else:
            groups.append([n])
            tokens = lengths[n]
    return groups


def _one_of(run: Run, i: int, length: int) -> Run:
    """Sequence i of a batch, without its padding."""
    tokens = (run.output, run.precision, run.variance, run.write_log_evidence, run.squares)
    output, *rest = (None if x is None else x[i : i + 1, :length] for x in tokens)
    assert output is not None
    return Run(output, map_state(lambda x: x[i : i + 1], run.state), *rest)
