"""Packed sequences: those of like length are filtered together, as a batch.

Shorter ones are filled up at the end with tokens that neither drift nor write, so that nothing changes but speed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from membydesign.ops.dispatch import run_filter
from membydesign.ops.inputs import Inputs
from membydesign.ops.recurrent import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.belief import Belief
    from membydesign.design import DesignModel

PADDING = 1.25
"""A batch is at most this many times as large as the tokens in it."""


def run_packed(design: DesignModel, initial: Belief, inputs: Inputs, bounds: Sequence[int], **way: Any) -> list[Run]:
    """One run for each sequence, in their order.

    Args:
        design: the assumptions.
        initial: one belief for each sequence, [N,...].
        inputs: of all sequences, one after another, [1,T,...].
        bounds: where each begins and the last one ends, [N+1].
        way: how to filter, as `run_filter` takes it.
    """
    rows = [inputs.between(start, end) for start, end in pairwise(bounds)]
    lengths = [end - start for start, end in pairwise(bounds)]
    # A transition of any other form might not stand still where there is no token.
    fill = way["method"] == "chunk" and design.transition.per_row(inputs.log_decay, inputs.angle, inputs.k) is not None
    found: dict[int, Run] = {}
    for batch in batches(lengths, PADDING if fill else 1.0):
        longest = max(lengths[n] for n in batch)
        together = Inputs.stacked([rows[n].padded(longest) for n in batch])
        run = run_filter(design, initial.map(lambda x, batch=batch: x[batch]), together, **way)
        for i, n in enumerate(batch):
            found[n] = _one_of(run, i, lengths[n])
    for n in range(len(lengths)):
        if not lengths[n]:  # nothing happened to its belief
            untouched = initial.map(lambda x, n=n: x[n : n + 1])
            found[n] = _one_of(next(iter(found.values())), 0, 0)._replace(belief=untouched)
    return [found[n] for n in range(len(lengths))]


def batches(lengths: Sequence[int], padding: float) -> list[list[int]]:
    """Sequences from short to long without empty ones, as many together as `padding` allows."""
    found: list[list[int]] = []
    tokens = 0
    for n in sorted((n for n in range(len(lengths)) if lengths[n]), key=lengths.__getitem__):
        if found and (len(found[-1]) + 1) * lengths[n] <= padding * (tokens + lengths[n]):
            found[-1].append(n)
            tokens += lengths[n]
        else:
            found.append([n])
            tokens = lengths[n]
    return found


def _one_of(run: Run, i: int, length: int) -> Run:
    """Sequence i of a batch, without what was filled up."""
    tokens = [None if x is None else x[i : i + 1, :length] for x in (run.variance, run.write_log_evidence)]
    belief = run.belief.map(lambda x: x[i : i + 1])
    return Run(run.output[i : i + 1, :length], belief, run.precision[i : i + 1, :length], *tokens)
